"""published_single: single as in the published script.

Texts are tokenised when their batch is made, and each step waits for its loss in order to print it. All nine published
rows also pad texts to 128 tokens; that is part of a row's configuration (config/published.yaml).

Advantages: none; it shows what these habits cost.
Limits: its time is no measure of one GPU.
On a CPU: the same.
"""

from lockstep.strategies import _published, single

ONE_DEVICE_ON = ("cpu", "cuda")


class Strategy(_published.Strategy, single.Strategy):
    pass


INHERITS = ("tokenise_late", "print_loss", "keep_gradients")
