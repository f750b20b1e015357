"""Constants of training that no key of the configuration sets."""

EPS = 1e-8  # of Adam and AdamW
LAST_RATE = 1e-7  # the final learning rate of a polynomial schedule, as in transformers


def factors(loss_weights: dict[str, float] | None, terms: tuple[str, ...]) -> list[float]:
    """The weight of each term in the loss, by `train.loss_weights`."""
    return [(loss_weights or {}).get(name, 1.0) for name in terms]
