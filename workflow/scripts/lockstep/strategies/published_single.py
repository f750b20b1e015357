"""published_single: single as the published script has it.

Texts are tokenised as their batch is made, and each step waits for its loss, to print it. What else was so for all nine
rows, padding to 128 tokens, a row's configuration says (config/published.yaml).

Advantages: none; it shows what these habits cost.
Limits: its time is no measure of one GPU.
On a CPU: the same.
"""

from lockstep.strategies import _published, single

ONE_DEVICE_ON = ("cpu", "cuda")


class Strategy(_published.Strategy, single.Strategy):
    pass


INHERITS = ("tokenise_late", "print_loss", "keep_gradients")
