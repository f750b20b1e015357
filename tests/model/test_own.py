"""A user's own model is refused if it keeps modules or parameters where PyTorch does not register them."""

import pytest

from lockstep.errors import BadInput
from lockstep.model import own

HIDDEN = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layers = {layers}

    def forward(self, pixel_values):
        return pixel_values
"""


@pytest.mark.parametrize(
    ("layers", "kind"),
    [
        ("[nn.Linear(2, classes)]", "list"),
        ("{'a': nn.Linear(2, classes)}", "dict"),
        ("(nn.Parameter(torch.ones(classes)),)", "tuple"),
    ],
)
def test_modules_in_a_plain_list_are_refused(tmp_path, layers, kind):
    """They are in no state dict: each rank would draw its own, and they would be neither trained nor stored."""
    file = tmp_path / "mine.py"
    file.write_text(HIDDEN.replace("{layers}", layers))
    with pytest.raises(BadInput, match=f"layers is a plain {kind} of modules or parameters"):
        own.initialise(f"{file}:Model", {"classes": 2}, 0)


def test_modules_that_pytorch_knows_are_taken(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(HIDDEN.replace("{layers}", "nn.ModuleList([nn.Linear(2, classes)])"))
    assert len(list(own.initialise(f"{file}:Model", {"classes": 2}, 0).parameters())) == 2
