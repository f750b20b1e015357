"""The claims: that each can be measured, and how a verdict follows from what was."""

import re
import subprocess
import sys

import pytest
import torch

from claims import claims
from claims.__main__ import MARKS, PAGE
from claims.claims import CLAIMS, HOLDS, NOT, UNKNOWN
from claims.runs import CONFIGS, Runs
from lockstep.config import reading
from tests import made
from tests.conftest import PROJECT

ROWS = reading.read(CONFIGS, ["hardware.device=cpu"]).rows


def runs(seconds: dict[str, list[float]], macro_f1: dict[str, list[float]] | None = None, **more) -> Runs:
    """What rows came to, that took these seconds in their repetitions."""
    records = {
        name: {k: made.run(clock={"train_seconds": value}, **more) for k, value in enumerate(several, 1)}
        for name, several in seconds.items()
    }
    tests = {
        name: {k: {"macro_f1": value} for k, value in enumerate(several, 1)}
        for name, several in (macro_f1 or {}).items()
    }
    return Runs(records, tests, {}, {})


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [([0.5, 0.51, 0.49], HOLDS), ([2.0, 2.1, 1.9], NOT), ([1.0, 1.1, 0.9], UNKNOWN), ([0.5], UNKNOWN)],
)
def test_a_claim_about_time_holds_where_the_whole_interval_says_so(ours, verdict):
    done = runs({"ddp_fp16": ours, "ddp": [1.0, 1.01, 0.99][: len(ours)]})
    assert claims.faster("ddp_fp16", "ddp")(done)[0] == verdict
    opposite = {HOLDS: NOT, NOT: HOLDS}.get(verdict, UNKNOWN)
    assert claims.costs("ddp_fp16", "ddp")(done)[0] == opposite


@pytest.mark.parametrize(("macro_f1", "verdict"), [(0.6, HOLDS), (0.2, NOT)])
def test_amp_must_be_as_good_too(macro_f1, verdict):
    seconds = {"ddp_amp": [0.5, 0.51, 0.49, 0.5, 0.5], "ddp_spawn": [1.0, 1.01, 0.99, 1.0, 1.0]}
    done = runs(seconds, {"ddp_amp": [macro_f1] * 5, "ddp_spawn": [0.6] * 5})
    assert claims.amp(done)[0] == verdict


def test_a_claim_about_gpus_is_not_judged_by_cpus(monkeypatch):
    done = runs({"ddp_fp16": [2.0, 2.1, 1.9], "ddp": [1.0, 1.01, 0.99]})
    claim = claims.Claim("helps", "–", claims.faster("ddp_fp16", "ddp"), of_gpus=True)
    monkeypatch.setattr(claims.torch.cuda, "is_available", lambda: False)
    verdict, told = claim.judge(done)
    assert (verdict, "CPUs stand in for GPUs" in told) == (UNKNOWN, True)
    monkeypatch.setattr(claims.torch.cuda, "is_available", lambda: True)
    assert claim.judge(done)[0] == NOT


@pytest.mark.parametrize(
    ("seconds", "verdict"), [([3.0, 3.1, 2.9], HOLDS), ([0.3, 0.31, 0.29], HOLDS), ([1.2, 1.3, 1.1], UNKNOWN)]
)
def test_what_was_said_of_the_most_is_not_refuted_by_less(seconds, verdict):
    done = runs({"horovod": seconds, "horovod_mpi": [1.0, 1.01, 0.99]})
    assert claims.backend(done)[0] == verdict


def test_a_change_of_speed_holds_in_either_direction():
    for ours, verdict in (([0.5, 0.51, 0.49], HOLDS), ([2.0, 2.1, 1.9], HOLDS), ([1.0, 1.1, 0.9], UNKNOWN)):
        done = runs({"more_ranks": ours, "ddp": [1.0, 1.01, 0.99]})
        assert claims.changes("more_ranks", "ddp")(done)[0] == verdict


@pytest.mark.parametrize(
    ("memory", "seconds", "verdicts"),
    [
        ([900, 600], [1.5, 1.52, 1.49], (HOLDS, HOLDS)),
        ([600, 600], [0.5, 0.51, 0.49], (NOT, NOT)),
        ([], [1.5, 1.52, 1.49], (UNKNOWN, UNKNOWN)),
    ],
)
def test_dataparallel_s_claims_take_two_gpus_and_are_judged_apart(memory, seconds, verdicts):
    done = runs({"dataparallel": seconds, "ddp": [1.0, 1.01, 0.99]}, memory_by_gpu=memory)
    assert (claims.first_gpu(done)[0], claims.than_dataparallel(done)[0]) == verdicts


def test_steps_are_halved_by_a_larger_batch_only():
    done = runs({"ddp": [1.0], "single": [1.0]}, global_batch=64, steps=105)
    verdict, told = claims.steps(done)
    assert (verdict, "both take 105 and 105 steps" in told) == (NOT, True)


def test_what_can_t_run_here_can_t_be_told():
    done = Runs({}, {}, {}, {"horovod_mpi": "Horovod is built without MPI", "horovod": "is not installed"})
    for measure in (claims.backend, claims.costs("horovod", "single")):
        verdict, told = measure(done)
        assert (verdict, "horovod" in told) == (UNKNOWN, True)


def test_every_row_that_a_claim_needs_is_in_its_configuration():
    source = (PROJECT / "claims" / "claims.py").read_text(encoding="utf-8")
    named = set(re.findall(r'(?:faster|costs|changes|quality|ratio)\("(\w+)", "(\w+)"', source))
    assert named
    assert {row for pair in named for row in pair} <= set(ROWS)


def test_claims_that_need_no_rows_are_measured_alone():
    command = [
        sys.executable,
        "-m",
        "claims",
        "set_epoch",
        "odd_numbers",
        "equal_seeds",
        "map_location",
        "unused_parameters",
    ]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    lines = [[cell.strip() for cell in line.strip("│").split("│")] for line in done.stdout.splitlines() if "│" in line]
    verdicts = {said: verdict for said, _, verdict, _ in lines}
    needs_two_gpus = verdicts.pop("Loading without map_location fills device 0")
    assert needs_two_gpus == (HOLDS if torch.cuda.device_count() > 1 else UNKNOWN)
    assert verdicts == {
        "A sampler without set_epoch repeats its order": HOLDS,
        "DistributedSampler distorts a test on odd numbers": HOLDS,
        "Equal seeds on all ranks make equal random numbers, so dropout and augmentation are alike": HOLDS,
        "find_unused_parameters avoids an error where parts of the model are unused": HOLDS,
    }
    assert any("10,003" in measured for *_, measured in lines)


@pytest.mark.slow
def test_claims_that_train_or_load_are_measured_alone():
    command = [sys.executable, "-m", "claims", "batch_norm", "divided_batch", "workers", "four_workers"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    lines = [[cell.strip() for cell in line.strip("│").split("│")] for line in done.stdout.splitlines() if "│" in line]
    verdicts = {said: verdict for said, _, verdict, _ in lines}
    assert verdicts.pop("SyncBatchNorm makes batch normalisation global") == HOLDS
    assert verdicts.pop("Each rank takes the batch size divided by the number of ranks") == HOLDS
    assert len(verdicts) == 2
    assert torch.cuda.is_available() or set(verdicts.values()) == {UNKNOWN}


def test_an_unknown_claim_is_refused():
    command = [sys.executable, "-m", "claims", "set_epoc"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no such claim: set_epoc; there are workers, four_workers, map_location" in done.stderr


def test_the_page_has_every_claim_and_its_verdict():
    table = PAGE.read_text(encoding="utf-8").partition(MARKS[0])[2].partition(MARKS[1])[0]
    lines = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]
    assert [line[0].removeprefix("| ") for line in lines] == [claim.said for claim in CLAIMS]
    assert {line[2] for line in lines} <= {HOLDS, NOT, UNKNOWN}


def figures(text: str) -> set[float]:
    """The figures with a point in a text, such as 1.65 and .67."""
    return {float(figure) for figure in re.findall(r"(?<![\d.])\d*\.\d+(?![\d.])", text)}


LINKING = sorted(
    page for page in (PROJECT / "docs" / "guide").glob("*.md") if "(../claims.md)" in page.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.name)
def test_figures_that_the_guide_takes_from_the_claims_are_there(page):
    """A paragraph, or a table's line, with a link to the claims has no figure that is in none of the pages it links."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    parts = [part for part in re.split(r"\n\n|\n(?=[|-])", text) if "(../claims.md)" in part]
    assert parts
    for part in parts:
        linked = [page.parent / link.partition("#")[0] for link in re.findall(r"\]\((\.\./[\w./-]+\.md[^)]*)\)", part)]
        assert linked
        known = set().union(*(figures(file.read_text(encoding="utf-8")) for file in linked))
        assert figures(re.sub(r"\]\([^)]*\)", "", part)) <= known, part


def test_the_guide_counts_the_claims_as_the_page_does():
    table = PAGE.read_text(encoding="utf-8").partition(MARKS[0])[2].partition(MARKS[1])[0]
    verdicts = [line.split(" | ")[2] for line in table.splitlines() if line.startswith("| ")][2:]
    assert LINKING, "or no page's figures are held against the claims"
    words = {1: "One", 8: "Eight", 13: "thirteen", 22: "Twenty-two"}
    page = (PROJECT / "docs/guide/elsewhere.md").read_text(encoding="utf-8")
    assert f"{words[len(verdicts)]} claims" in page
    for verdict, said in ((HOLDS, "{} hold there"), (NOT, "{} does not hold"), (UNKNOWN, "The other {} can't be told")):
        assert said.format(words[verdicts.count(verdict)]) in page
