"""The search keeps what pays, by figures that are given to it here; one slow test searches for real."""

import csv

import pytest
import yaml

from lockstep import tuning
from lockstep.config import reading
from lockstep.errors import BadInput, RunFailed, RunStopped
from lockstep.files import write_json
from lockstep.run import runs
from tests import made
from tests.conftest import Workplace, copy_project

TEXTS = 6400


@pytest.fixture
def results(tmp_path):
    write_json(tmp_path / "data" / "data.json", {"splits": {"train": {"texts": TEXTS}}})
    return tmp_path


@pytest.fixture
def search(results, monkeypatch):
    """Searches with runs that take as long as `cost(recipe)` says: (seconds per sample, seconds to compile)."""

    def run_with(cost, disturbed=(), **asked):
        def run(checked, row, repeat, folder):
            warm, cold = cost(row.options | {"precision": row.precision, "processes": row.hardware.processes})
            samples = row.train.max_steps * row.train.global_batch
            clock = {"train_seconds": warm * samples, "stall_seconds": 0, "cold_seconds": cold}
            watch = {"disturbed": ["a neighbour"] if row.name in disturbed else []}
            return made.run(clock=clock, work={"samples": samples}, watch=watch)

        monkeypatch.setattr(runs, "run", run)
        checked = reading.parse({"hardware": {"device": "cpu", "processes": 2}, "train": {"epochs": 2}} | asked)
        said = []
        return tuning.search(checked, results, said.append), said

    return run_with


def test_what_pays_is_kept_and_built_on(search):
    def cost(recipe):
        bf16 = 0.5 if recipe["precision"] == "bf16" else 1
        return 0.01 * bf16 * (0.6 if recipe["processes"] == 2 else 1) * (1.2 if recipe["packed"] else 1), 0

    tries, _ = search(cost)
    assert tuning.winner(tries) == {"strategy": "recipe", "processes": "auto", "precision": "bf16"}
    assert tries[0]["seconds"] == pytest.approx(0.01 * 2 * TEXTS)


@pytest.mark.parametrize(("compiling", "worth"), [(10.0, True), (500.0, False)])
def test_compiling_must_be_worth_it(search, compiling, worth):
    def cost(recipe):
        return (0.005, compiling) if recipe["compile"] == "dynamic" else (0.01, 0)

    assert ("compile" in tuning.winner(search(cost)[0])) == worth


def test_a_little_less_is_chance(search):
    assert tuning.winner(search(lambda recipe: (0.0097 if recipe["packed"] else 0.01, 0))[0]) == tuning.START


def test_what_seems_to_pay_once_is_not_kept(search):
    """A run that was quick by chance is not quick again; nor is what was compared with a recipe that was slow once."""
    lucky = iter([0.005])
    tries, said = search(lambda recipe: (next(lucky, 0.01) if recipe["packed"] else 0.01, 0))
    assert tuning.winner(tries) == tuning.START
    assert "packed: true: 0.50 of the time, 200 samples/s once warm, not kept" in said
    unlucky = iter([0.02])
    assert tuning.winner(search(lambda recipe: (next(unlucky, 0.01), 0))[0]) == tuning.START


@pytest.mark.parametrize("disturbed", ["again", "before"])
def test_what_was_disturbed_is_not_kept_and_says_so(search, disturbed):
    """What it was compared with may only have been slow because of the neighbour."""
    number = 1 + next(at for at, change in enumerate(tuning.CHANGES) if "packed" in change)
    tries, said = search(
        lambda recipe: (0.005 if recipe["packed"] else 0.01, 0), disturbed=[f"try{number}_{disturbed}"]
    )
    assert tuning.winner(tries) == tuning.START
    assert [attempt["name"] for attempt in tries if attempt["disturbed"] == "a neighbour"] == [f"try{number}"]
    assert "packed: true: 0.50 of the time, 200 samples/s once warm, not kept (disturbed: a neighbour)" in said
    assert tuning.winner(search(lambda recipe: (0.005 if recipe["packed"] else 0.01, 0))[0]) != tuning.START


def test_what_a_machine_can_not_do_is_no_try(search):
    def cost(recipe):
        if recipe["tf32"]:
            raise BadInput("no GPU")
        return 0.01, 0

    tries, said = search(cost)
    assert "tf32: true: not here (no GPU)" in said
    assert len(tries) == 1 + len(tuning.CHANGES)


def test_an_interrupt_ends_the_search_and_not_one_try(search):
    def cost(recipe):
        if recipe["precision"] == "bf16":
            raise RunStopped("try1: interrupted")
        return 0.01, 0

    with pytest.raises(RunStopped):
        search(cost)


def test_it_ends_in_time_and_says_what_was_left_out(search):
    tries, said = search(lambda recipe: (0.01, 0), tune={"seconds": 1e-9})
    assert len(tries) == 1
    assert said == [f"1e-09 s are over; {len(tuning.CHANGES)} changes were not tried"]


def test_without_a_first_run_there_is_nothing_to_search(search):
    def cost(recipe):
        raise RunFailed("no memory")

    with pytest.raises(RunFailed, match="the plain recipe can't be trained: no memory"):
        search(cost)


@pytest.mark.slow
def test_a_search_leaves_a_row_that_can_be_included(tmp_path):
    place: Workplace = copy_project(tmp_path)
    small = ["data={limit: 700}", "model={hidden_size: 32, layers: 1}", "train={epochs: 1}", "profile={steps: 0}"]
    small += ["tune={steps: 8, seconds: 12}", "hardware={device: cpu, processes: 2, oversubscribe: true}"]
    small += ["repeats=1", "retries=0"]
    finished = place.snakemake("--cores", "all", "tune", "--config", *small)
    assert finished.returncode == 0, finished.stderr
    row = yaml.safe_load(place.path("results/tune/tuned.yaml").read_text())["rows"]["tuned"]
    assert row["strategy"] == "recipe"
    with place.path("results/tune/tries.csv").open(newline="") as stream:
        assert next(csv.DictReader(stream))["kept"] == "True"
    trained = place.snakemake("--cores", "all", "tuned", "--configfile", "results/tune/tuned.yaml", "--config", *small)
    assert trained.returncode == 0, trained.stderr
    assert list(place.path("results/runs/tuned").glob("n*/rep1/test/report.json"))
