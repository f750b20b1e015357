"""What decides a training, and no key of the configuration sets."""

EPS = 1e-8  # of Adam and AdamW
LAST_RATE = 1e-7  # of the learning rate, where a polynomial schedule ends, as transformers has it


def factors(loss_weights: dict[str, float] | None, terms: tuple[str, ...]) -> list[float]:
    """What each term counts in a loss that is their sum, by `train.loss_weights`."""
    return [(loss_weights or {}).get(name, 1.0) for name in terms]
