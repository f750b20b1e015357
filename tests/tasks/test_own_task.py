"""docs/adding-a-task.md works as written: a task is one file and one line, and the model may be a user's own."""

import hashlib
import json
import re
import shutil

import pytest
from safetensors.torch import load_file

from lockstep.files import read_json
from tests.conftest import HOROVOD, PROJECT, copy_project

NEED_HOROVOD = pytest.mark.skipif(not HOROVOD, reason="needs: make horovod")

SMALL = """
data: {limit: 300}
train: {epochs: 2, max_steps: 8, eval_every: 4}
hardware: {device: cpu, processes: 2, threads: 1, oversubscribe: true, timeout: 400}
repeats: 1
retries: 0
profile: {steps: 0}
predict: {count: 2}
rows: {all_threads: null, ddp_amp: null, ddp_spawn: null, trainer: null, fabric: null, accelerate: null, horovod: null}
"""


def blocks(language: str) -> list[str]:
    text = (PROJECT / "docs" / "adding-a-task.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = copy_project(tmp_path_factory.mktemp("tasks"))
    place.path("small.yaml").write_text(SMALL)
    task, model = blocks("python")
    place.path("workflow/scripts/lockstep/tasks/wave_classification.py").write_text(task)
    place.path("my_model.py").write_text(model)
    place.path("waves.yaml").write_text(blocks("yaml")[0])
    return place


@pytest.mark.slow
def test_the_page_s_task_goes_from_the_data_to_the_report(place):
    finished = place.snakemake("--cores", "all", "--configfile", "waves.yaml", "small.yaml")
    assert finished.returncode == 0, finished.stderr[-3000:]
    rows = read_json(place.path("results/report/summary.json"))["rows"]
    assert {row["row"]: row["proof"] for row in rows} == dict.fromkeys(
        ("single", "dataparallel", "ddp", "deepspeed", "fsdp"), "equal"
    )
    assert all(row["accuracy"] > 0.4 for row in rows)


ASKED = ("--config=config/config.yaml", "--config=config/digits.yaml", "--config=small.yaml", "--set=data.limit=null")


def prepared(place, name: str):
    return place.script("prepare", *ASKED, "--results=own", f"--set=model.name={name}")


def test_the_page_s_model_is_trained(place):
    finished = prepared(place, "my_model.py:MyModel")
    assert finished.returncode == 0, finished.stderr
    for script, *more in (("plan",), ("launch", "--row=single")):
        finished = place.script(script, *ASKED, "--results=own", "--set=model.name=my_model.py:MyModel", *more)
        assert finished.returncode == 0, finished.stderr
    finished = place.script("evaluate", "own/runs/single/n1/rep1")
    assert finished.returncode == 0, finished.stderr
    assert place.path("own/runs/single/n1/rep1/model/model.py").read_text() == place.path("my_model.py").read_text()


@pytest.mark.slow
@pytest.mark.ci
def test_the_model_for_texts_of_the_recipes_is_trained_by_two_processes(place):
    shutil.copy(PROJECT / "docs" / "guide" / "snippets" / "my_text_model.py", place.folder)
    asked = ("--config=config/config.yaml", "--config=small.yaml", "--results=texts")
    asked += ("--set=model.name=my_text_model.py:MyModel",)
    for script, *more in (("prepare",), ("plan",), ("launch", "--row=ddp")):
        finished = place.script(script, *asked, *more)
        assert finished.returncode == 0, finished.stderr
    (record,) = place.path("texts/runs/ddp").glob("n2/rep1/record.json")
    losses = read_json(record)["losses"]
    assert losses[-1] < losses[0]


SCORES = """from torch import nn

def frozen(*sizes):
    return nn.Linear(*sizes).requires_grad_(False)

class MyModel(nn.Module):
    def __init__(self):
        super().__init__(); self.last = nn.Linear(64, 10)
    def forward(self, pixel_values):
        {first}
        return self.last(pixel_values.flatten(1))
"""
WRONG = [
    ("import nothing_like_it\n", "can't be imported: line 1: ModuleNotFoundError"),
    ("import torch\n\nclass MyModel(torch.nn.Module)\n    pass\n", "can't be imported: line 3: SyntaxError"),
    (
        "import torch\n\nclass Other(torch.nn.Module):\n    pass\n",
        "has no class MyModel that is a torch.nn.Module; it has Oth",
    ),
    ("import sys\n\nsys.exit(0)\n", "can't be imported: line 3: SystemExit: 0"),
    ("MyModel = 3\n", "has no class MyModel that is a torch.nn.Module; it has none"),
    (
        "import torch\n\nclass MyModel(torch.nn.Module):\n    def __init__(self, tokens): pass\n",
        "its constructor requires tokens, but this task passes channels, height, width, classes",
    ),
    (
        "import torch\n\nclass MyModel(torch.nn.Module):\n    def __init__(self):\n        raise KeyError('here')\n",
        "can't be created: line 5: KeyError",
    ),
    (
        "import torch\n\nclass MyModel(torch.nn.Module):\n    def forward(self, pixels): pass\n",
        r"fails on a sample \(pixel_values \[1, 1, 8, 8\]\)",
    ),
    (
        "import torch\n\nclass MyModel(torch.nn.Module):\n    def forward(self, pixel_values): return pixel_values\n",
        r"returns \[1, 1, 8, 8\] for one sample, but must return the scores of 10 classes",
    ),
    (SCORES.format(first="raise KeyError('here')"), r"fails on a sample \(.*\): line 10: KeyError: 'here'"),
    (SCORES.format(first="").replace("= nn.Linear", "= frozen"), "MyModel has no parameter to train"),
    (
        SCORES.format(first="").replace("nn.Linear(64, 10)", "nn.Linear(64, 10).double()"),
        r"has \S+ in float64, but weights are kept in float32",
    ),
    (
        SCORES.format(first="")
        + "    def get_extra_state(self): return 3\n    def set_extra_state(self, state): pass\n",
        "_extra_state in its state dict is not a dense tensor",
    ),
    (
        SCORES.format(first="") + "\n    def loss(self, outputs, labels):\n        raise KeyError('here')\n",
        "MyModel.loss fails: line 14: KeyError: 'here'",
    ),
    (
        SCORES.format(first="") + "\n    def loss(self, outputs, labels):\n        return outputs.detach().sum()\n",
        "the loss of MyModel depends on no parameter",
    ),
]


@pytest.mark.parametrize(("code", "said"), WRONG)
def test_a_model_that_can_t_be_used_is_refused_in_its_own_words(run_script, tmp_path, code, said):
    (tmp_path / "own.py").write_text(code)
    asked = [
        *("--set", "task=image-classification", "--set", "data.labels=null"),
        *("--set", "model.name=own.py:MyModel"),
    ]
    returned, _, errors = run_script("prepare", *asked)
    assert (returned, errors.count("\n")) == (2, 1), errors
    assert re.search(said, errors), errors
    assert not (tmp_path / "results" / "data").exists()


def launched(place, name: str, row: str, *more: str):
    return place.script("launch", *ASKED, "--results=own", f"--set=model.name={name}", f"--row={row}", *more)


@pytest.mark.slow
def test_a_model_brings_its_own_loss_which_must_be_a_scalar(place):
    model = place.path("my_model.py").read_text()
    own = "\n    def loss(self, outputs, labels):\n        return nn.functional.cross_entropy(outputs, labels{})\n"
    name, losses = "lossy.py:MyModel", []
    for written in (model, model + own.format("")):
        place.path("lossy.py").write_text(written)
        assert prepared(place, name).returncode == 0
        assert place.script("plan", *ASKED, "--results=own", f"--set=model.name={name}").returncode == 0
        finished = launched(place, name, "single")
        assert finished.returncode == 0, finished.stderr
        losses.append(read_json(place.path("own/runs/single/n1/rep1/record.json"))["losses"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    place.path("lossy.py").write_text(model + own.format(", reduction='none'"))
    finished = prepared(place, name)
    assert (finished.returncode, finished.stderr.count("\n")) == (2, 1), finished.stderr
    assert "MyModel.loss must return the mean loss of the batch, a scalar; not [1]" in finished.stderr


# A weight, a layer and a buffer under two names each, of which the second comes first in the alphabet.
TIED = """
import torch
from torch import nn


class MyModel(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.within, self.back = nn.Linear(64, 64), nn.Linear(64, 64)
        self.back.weight = self.within.weight
        self.again = self.within
        self.register_buffer("scale", torch.full((64,), 0.5))
        self.register_buffer("factor", self.scale)
        self.last = nn.Linear(64, classes)

    def forward(self, pixel_values):
        inner = torch.tanh(self.within(pixel_values.flatten(1)) * self.scale)
        return self.last(self.again(torch.tanh(self.back(inner) * self.factor)))
"""
EVERY = """
rows:
  ddp_spawn: {strategy: ddp_spawn}
  horovod: {strategy: horovod}
  zero1: {strategy: deepspeed, stage: 1}
  accelerate: {strategy: accelerate}
  trainer: {strategy: trainer}
  fabric: {strategy: fabric}
  zero_redundancy: {strategy: zero_redundancy}
"""
OF_TIED = (*ASKED, "--config=every.yaml", "--results=tied", "--set=model.name=tied.py:MyModel")


@pytest.fixture(scope="module")
def tied(place):
    """The task with tied weights, prepared in the folder `tied`."""
    place.path("tied.py").write_text(TIED)
    place.path("every.yaml").write_text(EVERY)
    place.prepare(*OF_TIED)
    return place


SLOW = ("single", "dataparallel", "ddp", "ddp_spawn", "deepspeed", "zero1", "accelerate", "fabric", "fsdp")


@pytest.mark.parametrize(
    "row",
    [
        "trainer",
        *(pytest.param(row, marks=pytest.mark.slow) for row in (*SLOW, "zero_redundancy")),
        pytest.param("horovod", marks=[pytest.mark.slow, NEED_HOROVOD]),
    ],
)
def test_every_row_saves_converts_and_tests_a_model_with_tied_weights(tied, row):
    finished = tied.script("launch", *OF_TIED, "--row", row)
    assert finished.returncode == 0, finished.stderr
    (run,) = tied.path("tied/runs").glob(f"{row}/n*/rep1")
    finished = tied.script("evaluate", str(run))  # which holds what was saved and converted against the live weights
    assert finished.returncode == 0, finished.stderr
    assert {"again.weight", "back.weight", "factor"} <= set(load_file(run / "model" / "model.safetensors"))


def test_parameters_that_no_step_uses_are_named_where_ranks_would_wait_for_them(place):
    model, name = place.path("my_model.py").read_text(), "unused.py:MyModel"
    spare = model.replace("super().__init__()", "super().__init__()\n        self.spare = nn.Linear(7, 7)")
    place.path("unused.py").write_text(spare)
    assert prepared(place, name).returncode == 0
    assert place.script("plan", *ASKED, "--results=own", f"--set=model.name={name}").returncode == 0
    refused = launched(place, name, "ddp")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
    assert "rows.ddp: the model's spare.weight (and 1 more) gets no gradient" in refused.stderr
    finished = launched(place, name, "ddp", "--set=rows.ddp.find_unused_parameters=true")
    assert finished.returncode == 0, finished.stderr


def test_a_model_s_file_is_copied_as_it_is(place):
    """Its Windows line ends and the encoding that its first line declares are kept."""
    lines = ["# -*- coding: latin-1 -*-", "# caf\xe9", *place.path("my_model.py").read_text().splitlines()]
    code = "\r\n".join([*lines, ""]).encode("latin-1")
    place.path("elsewhere.py").write_bytes(code)
    finished = prepared(place, "elsewhere.py:MyModel")
    assert finished.returncode == 0, finished.stderr
    assert place.path("own/data/weights/model.py").read_bytes() == code


def test_code_of_somebody_else_s_model_is_not_run(place, tmp_path):
    """The folder is somebody else's: all its hashes are right, but its file was never named in this project."""
    assert prepared(place, "my_model.py:MyModel").returncode == 0
    foreign = place.path("foreign")
    shutil.copytree(place.path("own/data/weights"), foreign)
    code = (foreign / "model.py").read_text() + "\nfrom pathlib import Path\nPath('ran').touch()\n"
    (foreign / "model.py").write_text(code)
    about = json.loads((foreign / "model.json").read_text())
    about["code_sha256"] = hashlib.sha256(code.encode()).hexdigest()
    (foreign / "model.json").write_text(json.dumps(about))
    finished = place.script("predict", "--model", "foreign", "--image", "any.png")
    assert (finished.returncode, finished.stderr.count("\n")) == (2, 1), finished.stderr
    assert "is code that was never named in this project" in finished.stderr
    assert not place.path("ran").exists()
