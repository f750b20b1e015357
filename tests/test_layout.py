"""Ranks that hold a replica of the model together: trained, proven, resumed and profiled as any row, and held equal."""

import contextlib
import json
import re
import shutil
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
import torch

from lockstep import paths
from lockstep.config import reading, registry
from lockstep.config.hardware import World
from lockstep.data.plan import Plan
from lockstep.errors import BadInput, OtherWork
from lockstep.rank.replay import require_equal_in_replicas
from lockstep.run.ledger import gather_ledger
from lockstep.run.progress import RankFiles
from tests.conftest import PROJECT, copy_project
from tests.rank.test_resumption import kill, wait_for_step

COPIES = PROJECT / "tests" / "strategies" / "copies.py"
CONFIGS = ("--config=config/config.yaml", "--config=small.yaml")
# Dropout is on, so that ranks of a replica must draw the same; the plan's steps are 18.
SMALL = """
data: {limit: 700}
model: {hidden_size: 32, layers: 1, dropout: 0.1}
train: {epochs: 1, global_batch: 31, eval_every: 7, checkpoint: last, checkpoint_every: 5, log_every: 6}
hardware: {device: cpu, processes: 4, threads: 1, timeout: 400, oversubscribe: true}
profile: {steps: 3}
repeats: 1
retries: 0
rows:
  ddp_amp: null
  pair: {strategy: copies, processes: 2}
  pairs: {strategy: copies}
  first: {strategy: copies, loss: first}
  divided: {strategy: copies, loss: divided}
  even: {strategy: copies, equal_shares: true, global_batch: 30, accumulation: 3}
  alone: {strategy: copies, copies: 1}
  two: {strategy: ddp, processes: 2}
"""
# Each is `copies` with one mistake, and what tells of it.
MISTAKES = {
    "drops_others": (
        """
import torch
from lockstep.strategies import copies
class Strategy(copies.Strategy):
    def wrap(self):
        super().wrap()
        torch.manual_seed(self.world.rank)
""",
        r"ranks 0 and 1 hold replica 0 together, but their losses differ from step 1 on",
    ),
    "all_count": (
        """
from dataclasses import replace
from lockstep.strategies import copies
class Strategy(copies.Strategy):
    def start(self):
        self.world = replace(super().start(), counts=True)
        return self.world
""",
        r"differs from the plan in step 1: 0 of 31 samples were not trained, 31 were trained that should not have been",
    ),
    "none_counts": (
        """
from dataclasses import replace
from lockstep.strategies import copies
class Strategy(copies.Strategy):
    def start(self):
        self.world = replace(super().start(), counts=False)
        return self.world
""",
        r"but no rank of this replica counts",
    ),
    "other_samples": (
        """
from lockstep.strategies import copies
class Strategy(copies.Strategy):
    def share(self):
        part, of = super().share()
        return (part if self.world.counts else of - 1 - part), of
""",
        r"hold replica 0 together, but (have not trained the same samples|their losses differ from step 1 on)",
    ),
    "no_layout": (
        """
from lockstep.strategies import copies, ddp
class Strategy(copies.Strategy):
    def start(self):
        return ddp.Strategy.start(self)
""",
        r"replicas: the row asks for 4 ranks, 2 to each replica, but wrong_no_layout has 4 replicas",
    ),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A copy of the project with the strategy `copies`, every mistake of it, and prepared data."""
    copy = copy_project(tmp_path_factory.mktemp("layout"))
    strategies = copy.path("workflow/scripts/lockstep/strategies")
    shutil.copy(COPIES, strategies)
    for name, (code, _) in MISTAKES.items():
        (strategies / f"wrong_{name}.py").write_text(code, encoding="utf-8")
    rows = "".join(f"  wrong_{name}: {{strategy: wrong_{name}}}\n" for name in MISTAKES)
    copy.path("small.yaml").write_text(SMALL + rows, encoding="utf-8")
    copy.prepare(*CONFIGS)
    return copy


@pytest.fixture(scope="module")
def referenced(place):
    """The same, with trained references."""
    finished = place.script("parity", *CONFIGS, "--row=reference", timeout=900)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return place


def bring_data(place, results: str) -> None:
    """Have what `prepare` and `plan` made in a results folder of its own, too."""
    if not place.path(f"{results}/data").is_dir():
        shutil.copytree(place.path("results/data"), place.path(f"{results}/data"))


def launch(place, row: str, *arguments: str, results: str = "results", code: int = 0) -> dict:
    """Train a row; returns its record, or what is written of its failure."""
    bring_data(place, results)
    finished = place.script("launch", *CONFIGS, "--row", row, "--results", results, *arguments)
    assert finished.returncode == code, finished.stdout + finished.stderr
    (file,) = place.path(results).glob(f"runs/{row}/n*/rep1/{paths.FAILED if code else paths.RECORD}")
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def trained(place):
    """The record of a row, which is trained once."""
    return cache(lambda row: launch(place, row))


def prove(place, row: str) -> dict:
    """The verdict on a row, or what is written of a trial that came to none."""
    place.script("parity", *CONFIGS, "--row", row)
    (folder,) = place.path("results/parity").glob(f"{row}/n*/rep1")
    file = folder / (paths.VERDICT if (folder / paths.VERDICT).is_file() else paths.FAILED)
    return {"proof": "failed"} | json.loads(file.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=pytest.mark.ci if row == "pairs" else ()) for row in ("pair", "pairs", "first")]
)
def test_ranks_of_a_replica_see_the_same_samples_and_draw_the_same_units(place, trained, row):
    record = trained(row)
    ranks = record["asked"]["hardware"]["processes"]
    assert record["replicas"] == ranks // 2
    assert record["seeds"][0::2] == record["seeds"][1::2]
    assert len(set(record["seeds"])) == ranks // 2
    plan = Plan.load(place.path(f"results/data/plan/{record['asked']['plan']}.npz"))
    (folder,) = place.path("results/runs").glob(f"{row}/n*/rep1")
    with np.load(folder / paths.LEDGER) as ledger:
        assert sorted(ledger["id"]) == sorted(plan.ids)
        assert sorted(set(ledger["rank"])) == list(range(0, ranks, 2))
    log = (folder / paths.LOG).read_text(encoding="utf-8")
    assert f"step 12/{plan.steps}: loss" in log
    assert "dev accuracy" in log


@pytest.mark.slow
def test_a_replica_of_two_ranks_trains_as_one_of_one(trained):
    """Two replicas, of two ranks or of one each: the same samples, dropped units, scores and weights."""
    four, two = trained("pairs"), trained("two")
    assert np.abs(np.subtract(four["losses"], two["losses"])).max() < 1e-5
    assert [scores["accuracy"] for scores in four["dev"]] == [scores["accuracy"] for scores in two["dev"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=pytest.mark.ci if row == "pairs" else ()) for row in ("pair", "pairs")]
    + ["first", "divided", "even"],
)
def test_a_layout_is_proven(referenced, row):
    verdict = prove(referenced, row)
    assert verdict["proof"] == "equal", verdict
    assert max(verdict["fp64"].values()) < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [pytest.param(name, marks=pytest.mark.ci) for name in MISTAKES])
def test_a_mistake_of_a_layout_is_seen(referenced, mistake):
    """By the proof, though its trial drops nothing; `no_layout` before anything is trained."""
    verdict = prove(referenced, f"wrong_{mistake}")
    assert verdict["proof"] == ("failed" if mistake == "no_layout" else "unequal")
    assert re.search(MISTAKES[mistake][1], verdict["reason"]), verdict["reason"]


@pytest.mark.slow
def test_other_dropped_units_end_a_timed_run_too(place):
    assert "their losses differ from step 1 on" in launch(place, "wrong_drops_others", code=1)["reason"]


def killed(place, row: str, name: str, *arguments: str) -> None:
    """Train in the results folder `name`, and kill the whole run after step 8, where the state of step 5 is saved."""
    bring_data(place, name)
    command = [sys.executable, "workflow/scripts/launch.py", *CONFIGS, "--row", row, "--results", name, *arguments]
    process = subprocess.Popen(
        command, cwd=place.folder, env=place.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_for_step(process, place.path(name), row, 8)
    kill(process)


@pytest.mark.slow
@pytest.mark.parametrize(("row", "most"), [("pair", 0), ("pairs", 1e-6), ("first", 1e-6)])
def test_a_killed_run_carries_on_as_if_nothing_had_been(place, trained, row, most):
    """To the bit with two ranks; of more, gloo sums gradients in an order by DDP's buckets, which begin anew."""
    whole, name = trained(row), f"parted-{row}"
    killed(place, row, name)
    parted = launch(place, row, results=name)
    assert parted["resumed"] in ([5], [10])
    assert parted["seeds"] == whole["seeds"]
    assert np.abs(np.subtract(parted["losses"], whole["losses"])).max() <= most
    assert [scores["accuracy"] for scores in parted["dev"]] == [scores["accuracy"] for scores in whole["dev"]]


@pytest.mark.slow
def test_a_run_goes_on_in_another_layout(place):
    """Two replicas of two ranks each become four of one, and the other way: ledger and losses are whole."""
    still = ("--set", "model.dropout=0")
    whole = launch(place, "two", *still, results="still")
    for first, then in (("pairs", "alone"), ("alone", "pairs")):
        name = f"from-{first}"
        killed(place, first, name, *still)
        record = launch(place, then, "--resume", f"{name}/runs/{first}/n4/rep1", *still, results=f"to-{then}")
        assert record["resumed"]
        assert np.abs(np.subtract(record["losses"], whole["losses"])).max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("row", ["pairs", "first"])
def test_a_layout_is_profiled_without_a_device_to_compare_it_with(place, row):
    finished = place.script("launch", *CONFIGS, "--row", row, "--profile")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    profile = json.loads(place.path(f"results/profile/{row}/n4/rep1/profile.json").read_text())
    assert profile["step_seconds"] > 0
    assert profile["seconds"]["communication"] > 0
    assert profile["exposed_by_difference"] is profile["alone_step_seconds"] is None
    assert len(profile["ranks"]) == 4


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """Reads rows of a configuration in which `copies` is a strategy."""
    for file in [*registry.STRATEGIES.glob("*.py"), COPIES]:
        shutil.copy(file, tmp_path)
    monkeypatch.setattr(registry, "STRATEGIES", tmp_path)
    hardware = {"device": "cpu", "processes": 4, "threads": 1, "oversubscribe": True}

    def read(train=None, **options):
        raw = {"hardware": hardware, "train": train or {}, "rows": {"x": {"strategy": "copies"} | options}}
        checked = reading.parse(raw)
        return checked, checked.rows["x"]

    registry.literals.cache_clear()
    yield read
    registry.literals.cache_clear()


def test_a_batch_is_shared_by_replicas(rows):
    _, row = rows(global_batch=2)
    row.refuse()
    assert (row.replicas, row.ranks_per_replica, row.hardware.processes) == (2, 2, 4)
    _, row = rows(global_batch=1)
    with pytest.raises(BadInput, match=r"rows.x.global_batch: 1 samples can't be shared by 2 replicas in 1 micro-b"):
        row.refuse()
    _, row = rows({"device_batch": 5, "global_batch": None}, accumulation=3)
    assert row.train.global_batch == 5 * 2 * 3


@pytest.mark.parametrize(("copies", "processes", "trial"), [(2, 4, 4), (3, 6, 3), (3, 3, 3), (2, 2, 2), (8, 16, 8)])
def test_a_trial_has_whole_replicas(rows, copies, processes, trial):
    checked, row = rows(copies=copies, processes=processes)
    row.refuse()
    proven = checked.trial(row)
    proven.refuse()
    assert proven.hardware.processes == trial
    assert proven.variations.keys() == {"fp64", "one_step", "dropout"}


def test_what_is_no_whole_replica_is_refused(rows):
    _, row = rows(copies=3)
    with pytest.raises(
        BadInput, match=r"copies: 3: 3 ranks hold one replica of the model together, but there are 4 ranks\."
    ):
        row.refuse()


@pytest.mark.parametrize(("accumulation", "batch"), [(1, 30), (4, 24), (15, 30), (40, 28)])
def test_a_strategy_of_fixed_shapes_is_proven_by_batches_that_are_shared_evenly(rows, accumulation, batch):
    parts = 2 * accumulation
    checked, row = rows(equal_shares=True, accumulation=accumulation, global_batch=parts)
    row.refuse()
    trial = checked.trial(row)
    trial.refuse()
    assert trial.train.global_batch == batch
    assert all(reference.train.global_batch == batch for reference in checked.references(row).values())
    _, row = rows(equal_shares=True, accumulation=accumulation, global_batch=parts + 1)
    with pytest.raises(BadInput, match=rf"can't be shared evenly by 2 replicas.*tensors have one shape.*of {parts}\."):
        row.refuse()


@pytest.mark.parametrize("counts", [(True, False, True, False), (False, True, False, True)])
def test_the_ledger_is_that_of_the_ranks_that_count(tmp_path, counts):
    write_ranks(tmp_path, counts, [[1, 2], [1, 2], [3], [3]])
    ledger = gather_ledger(tmp_path, 4)
    assert ledger["id"].tolist() == [1, 2, 3]
    assert set(ledger["rank"]) == {rank for rank, counting in enumerate(counts) if counting}


@pytest.mark.parametrize(
    ("counts", "ids", "says"),
    [
        ((True, False, True, False), [[1, 2], [1, 3], [3], [3]], "ranks 0 and 1 hold replica 0 together, but have not"),
        ((True, False, True, False), [[1, 2], [1, 2], [3], []], "ranks 2 and 3 hold replica 1 together, but have not"),
        ((True, False, False, False), [[1, 2], [1, 2], [3], [3]], "rank 2 belongs to replica 1, but no rank of this"),
    ],
)
def test_ranks_of_a_replica_that_trained_other_samples_are_told(tmp_path, counts, ids, says):
    write_ranks(tmp_path, counts, ids)
    with pytest.raises(OtherWork, match=says):
        gather_ledger(tmp_path, 4)


def write_ranks(folder, counts, ids_of_ranks) -> None:
    """The files of four ranks, two of each replica, that trained these samples in one step."""
    (folder / paths.RANKS).mkdir()
    for rank, (counting, ids) in enumerate(zip(counts, ids_of_ranks, strict=True)):
        files = RankFiles(folder, rank)
        files.replica, files.counts = rank // 2, counting
        files.consume(0, np.array(ids, dtype=np.int64))
        files.write({}, np.ones(1))


LOSSES = torch.tensor([[1.0, 2.0], [1.0, 2.0], [3.0, 4.0], [3.0, 4.0]])


@pytest.mark.parametrize(
    ("parts", "rank", "step", "told"),
    [
        (1, 1, 1, "ranks 0 and 1 .* from step 2 on"),
        (1, 3, 0, "ranks 2 and 3 .* from step 1 on"),
        (2, 3, 0, ""),
        (0, 3, 0, ""),
    ],
)
def test_losses_of_a_replica_are_equal_to_the_bit(parts, rank, step, told):
    """Where each of its ranks has the whole loss; parts of it may differ, and a rank may have none."""
    losses = LOSSES.clone()
    losses[rank, step] = torch.nextafter(losses[rank, step], torch.tensor(9.0))
    places = [[0, parts], [0, parts], [1, parts], [1, parts]]
    require_equal_in_replicas(LOSSES, places)
    with pytest.raises(OtherWork, match=told) if told else contextlib.nullcontext():
        require_equal_in_replicas(losses, places)
    terms = torch.stack([LOSSES, losses], dim=1)
    with pytest.raises(OtherWork, match=told) if told else contextlib.nullcontext():
        require_equal_in_replicas(terms, places)


def test_places_of_ranks():
    alone = [World(rank, rank, 4, None, "gloo") for rank in range(4)]
    assert [(world.replica, world.replicas, world.counts, world.tells) for world in alone] == [
        (rank, 4, True, rank == 0) for rank in range(4)
    ]
    pairs = [world.in_replicas(2) for world in alone]
    assert [(world.replica, world.replicas, world.counts, world.tells) for world in pairs] == [
        (0, 2, True, True),
        (0, 2, False, False),
        (1, 2, True, False),
        (1, 2, False, False),
    ]
