"""docs/before-you-rent.ipynb: its cells run one after the other, here with a model that is counted in seconds."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import PROJECT

NOTEBOOK = PROJECT / "docs" / "before-you-rent.ipynb"
SMALLER = {
    "hidden_size: 2048": "hidden_size: 128",
    "intermediate_size: 8192": "intermediate_size: 256",
    "num_hidden_layers: 16": "num_hidden_layers: 2",
    "num_attention_heads: 32": "num_attention_heads: 4",
    "num_key_value_heads: 8": "num_key_value_heads: 2",
    "vocab_size: 128256": "vocab_size: 512",
    "length = 2048": "length = 256",
    '"24GB", "--gpus", 8, "--rows", "ddp", "fsdp"': '"1800MB", "--gpus", 2, "--rows", "ddp"',
}
# What the last cell has drawn and the others have found.
TOLD = """
assert fits.largest.min() >= 1 and list(fits.index) == ["ddp"]
assert set(rent.machines) == {"h100", "a100-80gb", "mine"} and len(rent) == 15
assert (rent["at least"] <= rent.days).all() and (rent.days <= rent["at most"]).all()
assert (rent.cost > 0).all() and (rent.beyond[rent.machines == "mine"] != "").all()
figure.canvas.draw()
print("days", len(axes.lines))
"""


@pytest.mark.slow
@pytest.mark.ci
def test_the_notebook_runs(tmp_path):
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert all(not cell.get("outputs") for cell in cells), "what it printed on some machine is not kept"
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for large, small in SMALLER.items():
        assert large in code
        code = code.replace(large, small)
    file = tmp_path / "cells.py"
    file.write_text(code + TOLD, encoding="utf-8")
    variables = os.environ | {"MPLBACKEND": "Agg"}
    done = subprocess.run(
        [sys.executable, file], cwd=NOTEBOOK.parent, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "days 6" in done.stdout
