"""What every strategy must keep to, found by its file; and docs/adding-a-strategy.md, followed to the letter."""

import ast
import inspect
import json
import re
import sys
from dataclasses import fields
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score
from transformers import BertConfig, BertForSequenceClassification

from docs import strategies as page
from lockstep import evaluation
from lockstep.config import reading, registry
from lockstep.config.hardware import World
from lockstep.config.sections import AskedHardware, Train
from lockstep.data.plan import Plan
from lockstep.data.tokens import Tokens
from lockstep.errors import BadInput, RunFailed
from lockstep.proof import fairness
from lockstep.rank import dev_split
from lockstep.rank.training import Training
from lockstep.report import summary
from lockstep.strategies import single
from lockstep.tasks._classification import probabilities
from tests.conftest import PROJECT, copy_project

NAMES = registry.names()
# 797 texts to evaluate: a prime number, which no number of processes divides.
ODD = """
data: {limit: 1042, splits: {train: 0.1, dev: 0.8, test: 0.1}}
model: {hidden_size: 32, layers: 2, dropout: 0}
train: {epochs: 1, global_batch: 31, max_steps: 3, eval_every: 3, checkpoint: last, warmup: 0, schedule: constant}
hardware: {device: cpu, processes: 2, threads: 1, timeout: 400, oversubscribe: true}
profile: {steps: 3}
"""
SIZES = (1, 2, 3)


def sizes(name: str) -> list[int]:
    """The numbers of processes that hold whole replicas of the model, by a strategy's defaults.

    There are none for a strategy that does not train single's model, or not here: published scripts
    (tests/studies/test_published_rows.py), local steps (test_averaging.py), cp (test_meshes.py), a user's script.
    """
    if name not in NAMES:
        return list(SIZES)
    about = registry.literals(name)
    another = any(not values for values, _ in about["OTHER_MODEL"])  # whatever its options
    if registry.study(name) or another or name in ("cp", "script"):
        return []
    known = about["OPTIONS"].items()
    together = registry.ranks_per_replica(name, {key: option.get("default") for key, option in known})
    return [size for size in SIZES if size % together == 0]


# What nn.DataParallel does with several GPUs, which without any it does not do: one process trains on all devices.
SHARES = '''
"""shares: dataparallel over shares of a CPU's cores: PyTorch's own copies of the model, each in a thread of its own."""

import importlib
import threading
from unittest import mock

import torch

from lockstep.strategies import dataparallel

ONE_PROCESS_ON = ("cpu",)
replicate = importlib.import_module("torch.nn.parallel.replicate")


class Strategy(dataparallel.Strategy):
    def set_up(self, model, make_optimizer):
        super().set_up(model, make_optimizer)
        self.model = Shares(self.model.module)
        self.model.device_ids = list(range(self.hardware.devices))
        self.model.output_device = 0
        self.notes.clear()


def copies(tensors, devices, detach=False):
    return [[tensor.detach() if detach else tensor.view_as(tensor) for tensor in tensors] for _ in devices]


class Shares(torch.nn.DataParallel):
    def forward(self, **inputs):
        parts = zip(*(tensor.chunk(len(self.device_ids)) for tensor in inputs.values()))
        parts = [dict(zip(inputs, part)) for part in parts]
        with (
            mock.patch.object(replicate, "_broadcast_coalesced_reshape", copies),
            mock.patch.object(replicate, "_get_device_index", lambda device, _: device),
        ):
            replicas = replicate.replicate(self.module, self.device_ids[: len(parts)], not torch.is_grad_enabled())
        outputs, autocast, gradients = {}, torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()

        def work(number):  # as in torch/nn/parallel/parallel_apply.py
            torch.set_grad_enabled(gradients)
            with torch.amp.autocast("cpu", torch.float16, enabled=autocast):
                outputs[number] = replicas[number](**parts[number])

        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(parts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        names = outputs[0]  # torch/nn/parallel/scatter_gather.py
        return type(names)((name, torch.cat([outputs[n][name] for n in range(len(parts))])) for name in names)
'''


@pytest.mark.parametrize("name", NAMES)
def test_a_strategy_says_what_it_is_and_what_it_takes(name):
    about = ast.get_docstring(ast.parse(registry.path(name).read_text(encoding="utf-8")))
    assert about.startswith(f"{name}: ")
    assert [word for word in ("Advantages", "Limits", "On a CPU") if not re.search(rf"^{word}: ", about, re.M)] == []
    for key, option in registry.literals(name)["OPTIONS"].items():
        narrows = key in {field.name for section in (Train, AskedHardware) for field in fields(section)}
        assert {"description"} | (set() if narrows else {"default"}) <= option.keys(), key
    row = reading.parse({"rows": {name: {"strategy": name}}}).rows[name]
    named = {key for key in row.options if not key.endswith("_sha256")}  # of files that options name
    assert named <= set(registry.literals(name)["OPTIONS"])


def available(name: str) -> bool:
    return not reading.parse({"rows": {name: {"strategy": name}}}).rows[name].unavailable


def skip_if_unavailable(name: str) -> None:
    if not available(name):
        pytest.skip(f"{name} is unavailable here: {', '.join(registry.literals(name)['NEEDS'])} is not installed")


@pytest.mark.parametrize("name", NAMES)
def test_methods_take_what_single_s_take(name):
    skip_if_unavailable(name)
    for method, theirs in inspect.getmembers(single.Strategy, inspect.isfunction):
        ours = getattr(registry.load(name), method)
        assert list(inspect.signature(ours).parameters)[: len(inspect.signature(theirs).parameters)] == list(
            inspect.signature(theirs).parameters
        ), method


def test_a_method_by_its_earlier_name_is_not_passed_over(monkeypatch):
    """Another strategy would be trained, and the proof could call it equal."""

    class Strategy(single.Strategy):
        def prepare(self, model, make_optimizer):
            super().set_up(model, make_optimizer)

    monkeypatch.setitem(sys.modules, "lockstep.strategies.earlier", SimpleNamespace(Strategy=Strategy))
    with pytest.raises(BadInput, match=r"earlier\.py: the method `prepare` is called `set_up` now, and would not be"):
        registry.load("earlier")


def test_the_page_of_strategies_is_what_the_files_say():
    for name in NAMES:
        skip_if_unavailable(name)
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run `make docs`"


def test_gathered_predictions_that_hold_a_sample_twice_are_refused():
    class Twice(single.Strategy):
        """Both ranks answer with rank 0's share."""

        def all_gather(self, tensor):
            return torch.stack([tensor, tensor])

    hardware = {"device": "cpu", "processes": 2, "oversubscribe": True}
    rows = {"two": {"strategy": "ddp", "global_batch": 4}}
    settings = reading.parse({"hardware": hardware, "rows": rows}).rows["two"].settings()
    strategy = Twice(settings)
    strategy.world = World(rank=0, local_rank=0, size=2, device=torch.device("cpu"), backend=None)
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    strategy.model = BertForSequenceClassification(BertConfig(vocab_size=9, num_labels=2, **size))
    tokens = Tokens(np.arange(7), np.full(7, 1), np.zeros(7, dtype=np.int64), 0)

    class Quiet:
        def alive(self):
            pass

    training = Training(strategy, registry.load_task(settings.task)(), settings, None, None, None, Quiet())
    with pytest.raises(RunFailed, match="do not hold each sample of the split exactly once"):
        dev_split.gather_results(training, tokens)


def blocks(language: str) -> list[str]:
    text = (PROJECT / "docs" / "adding-a-strategy.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_every_literal_of_a_strategy_is_explained():
    text = (PROJECT / "docs" / "adding-a-strategy.md").read_text(encoding="utf-8")
    table = text.partition("### Literals of the file")[2].partition("###")[0]
    explained = re.findall(r"`([A-Z0-9_]+)`", "".join(line.split("|")[1] for line in table.splitlines() if "|" in line))
    assert sorted(explained) == sorted(registry.literals("single"))


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """A copy of the project with prepared data, and the page's own strategy in it."""
    place = copy_project(tmp_path_factory.mktemp("odd"))
    (code,), (row,) = blocks("python"), blocks("yaml")
    place.path("workflow/scripts/lockstep/strategies/manual.py").write_text(code)
    place.path("workflow/scripts/lockstep/strategies/shares.py").write_text(SHARES)
    place.path("mine.yaml").write_text(row)
    names = [*NAMES, "manual", "shares"]
    sized = {f"{name}_{size}": {"strategy": name, "processes": size} for name in names for size in sizes(name)}
    sized["shares_bf16"] = {"strategy": "shares", "precision": "bf16"}
    sized |= {f"lora_{size}": {"strategy": "recipe", "processes": size, "lora": 4} for size in SIZES}
    place.path("odd.yaml").write_text(ODD + "rows: " + json.dumps(sized))
    place.prepare("--config=config/config.yaml", "--config=odd.yaml")
    return place


@pytest.mark.slow
def test_the_page_s_strategy_is_a_row_like_any_other(odd):
    """By Snakemake, as the page says; and its mistake, the one that the page warns of, is seen."""
    asked = ("parity_manual", "--configfile", "odd.yaml", "mine.yaml")
    finished = odd.snakemake("--cores", "all", *asked)
    assert finished.returncode == 0, finished.stderr
    assert re.search(r"manual\W+equal\W+\de-1\d", finished.stdout)
    verdict = odd.path("results/parity/manual/n2/rep1/verdict.json")
    assert json.loads(verdict.read_text())["proof"] == "equal"

    file = odd.path("workflow/scripts/lockstep/strategies/manual.py")
    right = file.read_text()
    wrong = right.replace("parameter.grad /= self.world.size", "pass")
    assert wrong != right
    try:
        file.write_text(wrong)
        finished = odd.snakemake("--cores", "all", *asked)
        unequal = json.loads(verdict.read_text())
    finally:
        file.write_text(right)
    assert unequal["proof"] == "unequal"
    assert unequal["distances"]["norm"] == pytest.approx(1, abs=1e-3)
    assert unequal["fp64"]["norm"] == pytest.approx(1, abs=1e-3)
    # Seen at the terminal, not in a log only.
    assert finished.returncode == 1
    assert "not proven to train the same model as single: manual" in finished.stdout
    assert "norm 1 is above" in " ".join(finished.stdout.split())


@pytest.fixture(scope="module")
def train(odd):
    """Trains and converts a row of ODD; returns its folder, record, and each label's probability on the dev split."""

    @cache
    def once(row: str):
        finished = odd.script("launch", "--config=config/config.yaml", "--config=odd.yaml", "--row", row)
        assert finished.returncode == 0, finished.stderr
        (run,) = odd.path("results/runs").glob(f"{row}/n*/rep1")
        converted = odd.script("convert", str(run.relative_to(odd.folder)))
        assert converted.returncode == 0, converted.stderr
        tokens = Tokens.load(odd.path("results/data/dataset/dev"))
        chances = probabilities(evaluation.load_model(run / "model"), tokens)
        return run, json.loads((run / "record.json").read_text()), tokens.labels, chances

    return once


@pytest.mark.slow
def test_one_process_trains_on_two_devices(odd, monkeypatch):
    """From the launch to the table: what counts ranks finds one, what counts devices two."""
    configured = ["--config=config/config.yaml", "--config=odd.yaml"]
    for script, *arguments in (
        ("launch", *configured, "--row=shares_2"),
        ("launch", *configured, "--row=shares_bf16"),  # autocast's type does not come with the threads
        ("launch", *configured, "--row=shares_2", "--profile"),
        ("evaluate", "results/runs/shares_2/n2/rep1"),
        ("parity", *configured, "--row=reference", "--row=shares_2"),
    ):
        finished = odd.script(script, *arguments)
        assert finished.returncode == 0, finished.stdout + finished.stderr

    run = odd.path("results/runs/shares_2/n2/rep1")
    made = json.loads((run / "record.json").read_text())
    assert (made["world_size"], made["settings"]["world_size"], len(made["seeds"])) == (2, 1, 1)
    assert "step 3/3" in (run / "run.log").read_text()
    half = json.loads(odd.path("results/runs/shares_bf16/n2/rep1/record.json").read_text())
    assert half["settings"]["computes_in"] == "bfloat16"
    profile = json.loads(odd.path("results/profile/shares_2/n2/rep1/profile.json").read_text())
    assert profile["step_seconds"] > 0
    verdict = json.loads(odd.path("results/parity/shares_2/n2/rep1/verdict.json").read_text())
    assert (verdict["proof"], verdict["world_size"]) == ("equal", 2), verdict

    def told() -> list[str]:
        of_run = [what for where, what in fairness.check(odd.path("results")).breaches if where == str(run)]
        return [what for what in of_run if "disturbed" not in what and "differ from their commit" not in what]

    (missing,) = told()
    assert re.fullmatch("its ledger can't be checked: .*shares.py, its strategy, is not there; put it there", missing)
    monkeypatch.setattr(registry, "STRATEGIES", odd.path("workflow/scripts/lockstep/strategies"))
    assert told() == []
    monkeypatch.chdir(odd.folder)
    checked = reading.read([odd.path("config/config.yaml"), odd.path("odd.yaml")], ["repeats=1"])
    (line,) = (row for row in summary.gather(checked, odd.path("results")).rows if row["row"] == "shares_2")
    assert (line["status"], line["world_size"], line["proof"]) == ("ok", 2, "equal")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"), [(name, size) for name in (*NAMES, "manual", "shares") for size in sizes(name)]
)
def test_with_any_number_of_processes(odd, train, name, size):
    """Ledger, losses, gathered evaluation and checkpoint are those of one process, on data that no number divides."""
    if name in NAMES:
        skip_if_unavailable(name)
    run, record, labels, chances = train(f"{name}_{size}")

    plan = Plan.load(odd.path(f"results/data/plan/{record['asked']['plan']}.npz"))
    with np.load(run / "ledger.npz") as ledger:
        assert sorted(zip(ledger["step"], ledger["id"], strict=True)) == sorted(
            (step, sample) for step in range(plan.steps) for sample in plan.step_ids(step)
        )
        one_process = record["settings"]["world_size"] == 1  # which may train on several devices
        assert len(set(ledger["rank"])) == (1 if one_process else record["replicas"])
    assert len(set(plan.ids)) == len(plan.ids)

    (gathered,) = record["dev"]
    assert gathered["support"] == len(labels) == 797
    _, reference, _, theirs = train("single_1")
    tolerance = 1e-5 if record["precision"] == "fp32" else 2e-2
    assert np.abs(np.subtract(record["losses"], reference["losses"])).max() < tolerance
    assert np.abs(chances - theirs).max() < tolerance
    if record["precision"] == "fp32":
        predicted = chances.argmax(axis=1)
        assert gathered["accuracy"] == pytest.approx(accuracy_score(labels, predicted))
        assert gathered["macro_f1"] == pytest.approx(f1_score(labels, predicted, average="macro"))
        assert predicted.tolist() == theirs.argmax(axis=1).tolist()


@pytest.mark.slow
def test_lora_is_the_same_with_any_number_of_processes(train):
    """It trains another model than single, so its ranks are held against lora in one process."""
    pytest.importorskip("peft", reason="needs peft: make setup")
    (_, alone, _, chances), *others = (train(f"lora_{size}") for size in SIZES)
    for _, record, _, theirs in others:
        assert np.abs(np.subtract(record["losses"], alone["losses"])).max() < 1e-5
        assert np.abs(chances - theirs).max() < 1e-5
    _, single, _, _ = train("single_1")
    assert np.abs(np.subtract(single["losses"], alone["losses"])).max() > 1e-3
