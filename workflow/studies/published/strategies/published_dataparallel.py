"""published_dataparallel: dataparallel as in the published script, with the habits of published_single.

Advantages: none; it shows what these habits cost.
Limits: its time is no measure of nn.DataParallel.
On a CPU: without a GPU, nn.DataParallel only calls the model, so this is published_single with a wrapper.
"""

from lockstep.strategies import _published, dataparallel

ONE_DEVICE_ON = ("cpu",)
ONE_PROCESS_ON = ("cpu", "cuda")


class Strategy(_published.Strategy, dataparallel.Strategy):
    pass


INHERITS = ("tokenise_late", "print_loss", "keep_gradients")
