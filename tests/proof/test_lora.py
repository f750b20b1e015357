"""LoRA by every strategy equals LoRA on one device, mistakes are caught, and the adapter is stored beside the model."""

import json

import numpy as np
import pytest
import torch

from lockstep.data.tokens import Tokens
from lockstep.errors import OtherWork
from lockstep.model import lora, models
from lockstep.proof import parity
from lockstep.proof.fairness import sealed
from lockstep.tasks._classification import probabilities
from tests.conftest import HOROVOD, copy_project
from tests.model.test_lora import model, train

peft = pytest.importorskip("peft", reason="needs peft: make setup")
# Each strategy once with its own options, and with the targets, dropout and scale of the trained rows.
NAMED = "lora: 4, lora_alpha: 16, lora_targets: [query, key, dense], lora_dropout: 0.1"
HONEST = {
    "single": f"{{strategy: single, {NAMED}}}",
    "ddp": "{strategy: ddp, lora: 4, static_graph: true}",
    "unused": f"{{strategy: ddp, find_unused_parameters: true, accumulation: 2, {NAMED}}}",
    "zero_0": f"{{strategy: deepspeed, stage: 0, {NAMED}}}",
    "zero_1": "{strategy: deepspeed, stage: 1, lora: 4}",
    "zero_2": f"{{strategy: deepspeed, stage: 2, accumulation: 2, {NAMED}}}",
    "zero_3": f"{{strategy: deepspeed, activation_checkpointing: true, {NAMED}}}",
    "fsdp": f"{{strategy: fsdp, accumulation: 2, {NAMED}}}",
    "accelerate": "{strategy: accelerate, lora: 4}",
    "trainer": f"{{strategy: trainer, accumulation: 2, {NAMED}}}",
    "fabric": "{strategy: fabric, lora: 4}",
    "recipe": "{strategy: recipe, lora: 4, packed: true}",
    "horovod": "{strategy: horovod, lora: 4}",
    "sharded_state": "{strategy: zero_redundancy, lora: 4}",
}
REDUCED = {"fsdp_bf16": "{strategy: fsdp, precision: bf16, lora: 4}"}
WRONG = {
    # Each rank initialises its adapter differently. DDP broadcasts rank 0's; FSDP leaves each rank its own.
    "other_start": """
import torch
from lockstep.strategies import ddp
class Strategy(ddp.Strategy):
    def set_up(self, model, make_optimizer):
        torch.manual_seed(self.world.rank + 1)
        for name, weight in model.named_parameters():
            if ".lora_A." in name:
                torch.nn.init.kaiming_uniform_(weight, a=5**0.5)
        super().set_up(model, make_optimizer)
""",
    # The updates are scaled by two after the settings were read back.
    "other_scale": """
from lockstep.strategies import ddp
class Strategy(ddp.Strategy):
    def connect(self):
        super().connect()
        for module in self.module.modules():
            if hasattr(module, "lora_A"):
                module.scaling["default"] *= 2
""",
    # The head is not trained.
    "frozen_head": """
from lockstep.strategies import ddp
class Strategy(ddp.Strategy):
    def set_up(self, model, make_optimizer):
        model.classifier.requires_grad_(False)
        super().set_up(model, make_optimizer)
""",
}
WRONG["other_start_fsdp"] = WRONG["other_start"].replace("ddp", "fsdp")
SMALL = """
data: {limit: 700}
model: {hidden_size: 32, layers: 2}
train: {epochs: 1, global_batch: 31, max_steps: 9, eval_every: 4, learning_rate: 0.01, warmup: 2}
hardware: {device: cpu, processes: 2, threads: 1, timeout: 240, oversubscribe: true}
rows:
  all_threads: null
  dataparallel: null
  ddp_spawn: null
  ddp_amp: null
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = copy_project(tmp_path_factory.mktemp("lora"))
    rows = HONEST | REDUCED | {f"wrong_{name}": f"{{strategy: wrong_{name}, lora: 4}}" for name in WRONG}
    place.path("lora.yaml").write_text(SMALL + "".join(f"  {name}: {row}\n" for name, row in rows.items()))
    for name, code in WRONG.items():
        place.path(f"workflow/scripts/lockstep/strategies/wrong_{name}.py").write_text(code)
    for script in ("prepare", "plan"):
        succeeds(place, script)
    return place


def succeeds(place, script: str, *arguments: str, code: int = 0) -> str:
    configured = ("--config=config/config.yaml", "--config=lora.yaml") if script != "convert" else ()
    finished = place.script(script, *configured, *arguments, timeout=1800)
    assert finished.returncode == code, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def references(place):
    """The references of all rows, trained once."""
    succeeds(place, "parity", "--row=reference")


def verdict(place, row: str) -> dict:
    (file,) = place.path("results/parity").glob(f"{row}/n*/rep1/verdict.json")
    return json.loads(file.read_text())


def available(row: str) -> None:
    if row == "horovod" and not HOROVOD:
        pytest.skip("Horovod is not installed: `make horovod` builds it")


@pytest.mark.slow
@pytest.mark.parametrize("row", [*HONEST, *REDUCED])
def test_on_several_ranks_it_is_what_it_is_on_one(place, references, row):
    available(row)
    succeeds(place, "parity", "--row", row)
    found = verdict(place, row)
    assert found["proof"] == ("within-tolerance" if row in REDUCED else "equal")
    assert found["world_size"] == (1 if row == "single" else 2)
    assert not found["lossy"]
    if row in REDUCED:
        return
    assert found["above_floor"] < 30
    assert found["below_mistake"] > 1000
    if not row.startswith("zero_"):
        assert max(found["fp64"].values()) < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize("mistake", WRONG)
def test_what_is_not_is_told_apart(place, references, mistake):
    succeeds(place, "parity", "--row", f"wrong_{mistake}", code=1)
    found = verdict(place, f"wrong_{mistake}")
    assert found["proof"] == "unequal"
    assert found["above_floor"] > 30 * 10
    assert max(found["fp64"].values()) > 1e-4


def test_a_reference_of_another_rank_is_no_measure():
    ours, theirs = (parity.Trained([1.0], 1.0, lora.put_into(model(), train(rank)).state_dict()) for rank in (4, 8))
    with pytest.raises(OtherWork, match=r"it trained other tensors: .*lora_A.* is \[8, 32\], but \[4, 32\] in the ref"):
        ours.distances(theirs, {})
    with pytest.raises(OtherWork, match=r"it trained other tensors: .* is missing, but "):
        ours.distances(parity.Trained([1.0], 1.0, model().state_dict()), {})


TRAINED = ("ddp", "zero_1", "zero_2", "zero_3", "fsdp", "accelerate", "trainer", "fabric", "recipe", "horovod")


@pytest.mark.slow
@pytest.mark.parametrize("row", TRAINED)
def test_model_and_adapter_come_from_every_framework_s_checkpoint(place, row):
    available(row)
    succeeds(place, "launch", "--row", row)
    (run,) = place.path("results/runs").glob(f"{row}/n2/rep1")
    succeeds(place, "convert", str(run.relative_to(place.folder)))
    record = json.loads((run / "record.json").read_text())
    told = {"lora": 4, "lora_alpha": 4, "lora_dropout": 0.0, "lora_targets": ["query", "value"]}
    if "alpha" in HONEST[row]:
        told |= {"lora_alpha": 16, "lora_dropout": 0.1, "lora_targets": ["dense", "key", "query"]}
    assert record["settings"]["lora"] == told
    trained, whole = (record["settings"][name] for name in ("trained_parameters", "parameters"))
    assert f"LoRA trains {trained:,} numbers; the model has {whole:,}" in record["notes"]
    assert trained < whole / 2
    assert record["division"] == "open"
    assert list(sealed(run, record, place.path("results"))) == []

    start = place.path("results/data/weights")
    merged = models.load(run / "model").eval()
    adapted = peft.PeftModel.from_pretrained(models.load(start), run / "model" / "adapter").eval()
    tokens = Tokens.load(place.path("results/data/dataset/dev"))
    chances = [probabilities(model, tokens) for model in (merged, adapted, models.load(start).eval())]
    assert np.abs(chances[0] - chances[1]).max() < 1e-5
    assert np.abs(chances[0] - chances[2]).max() > 1e-2
    kept = {name: tensor for name, tensor in merged.state_dict().items() if "embeddings" in name}
    before = models.load(start).state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in kept.items())


@pytest.mark.slow
def test_an_adapter_that_was_changed_is_noticed(place):
    run = place.path("results/runs/ddp/n2/rep1")
    if not run.is_dir():
        test_model_and_adapter_come_from_every_framework_s_checkpoint(place, "ddp")
    file = run / "model" / "adapter" / "adapter_config.json"
    file.write_text(file.read_text().replace('"lora_alpha": 4', '"lora_alpha": 8'))
    (why,) = sealed(run, json.loads((run / "record.json").read_text()), place.path("results"))
    assert "adapter_config.json: is missing or has changed" in why
