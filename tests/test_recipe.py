"""What the strategy recipe does to batches, without a device."""

import numpy as np
import torch

from lockstep.hardware import World
from lockstep.strategies import recipe
from lockstep.tokens import Tokens

OPTIONS = {"packed": False, "compile": "off", "weights": "fp32", "tf32": False, "resident": False}


def strategy(**options) -> recipe.Strategy:
    hardware = {"device": "cpu", "processes": 1}
    train = {"clip": 1.0, "accumulation": 1}
    made = recipe.Strategy({"options": OPTIONS | options, "hardware": hardware, "precision": "fp32", "train": train})
    made.start()
    return made


def tokens() -> Tokens:
    lengths = np.array([3, 9, 4, 30, 2])
    return Tokens(np.arange(lengths.sum()) + 5, lengths, np.array([0, 1, 2, 0, 1]), pad_id=1)


def test_alone_it_joins_nobody():
    assert strategy().world == World(rank=0, local_rank=0, size=1, device=torch.device("cpu"), backend=None)


def test_batches_put_together_on_the_device_are_those_of_the_host():
    ids = np.array([4, 0, 2, 1])
    on_device = strategy(resident=True).batch(tokens(), ids, 9)
    for name, array in tokens().batch(ids, 9).items():
        assert on_device[name].tolist() == array.tolist(), name
        assert on_device[name].dtype == torch.int64


def test_static_widths_are_few():
    made = strategy(compile="static")
    made.module = torch.nn.Identity()
    made.module.config = type("Config", (), {"max_position_embeddings": 40})
    widths = [made.batch(tokens(), np.array([0, 2]), width)["input_ids"].shape[1] for width in (4, 16, 17, 39)]
    assert widths == [16, 16, 32, 40]
