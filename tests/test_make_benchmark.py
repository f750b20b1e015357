"""`make benchmark` itself: that it runs and prints its ratios. What they are is for a quiet machine to say."""

import re
import subprocess
import sys

import pytest
import torch
import yaml

from benchmarks import growth, processes, roofline, workflow
from lockstep.files import read_json
from lockstep.model.metrics import PEAKS_FILE
from tests.conftest import PROJECT


@pytest.mark.slow
@pytest.mark.ci
def test_the_ratios_are_measured():
    command = [sys.executable, "-m", "benchmarks", "--rounds", "1", "padding", "harness"]
    done = subprocess.run(
        command,
        cwd=PROJECT,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    ratios = dict(re.findall(r"│ (single over [^│]+?) +│ +([\d.]+) │", done.stdout))
    assert len(ratios) == 2
    assert all(float(ratio) > 0.5 for ratio in ratios.values())


@pytest.fixture
def threads():
    """The loops take one thread; the tests after them have what they had."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_growth_and_memory_are_measured(tmp_path, monkeypatch, threads):
    monkeypatch.setattr(growth, "SIZES", (600, 900, 1200))
    monkeypatch.setattr(growth, "ROWS", 300)
    monkeypatch.setattr(growth, "STEPS", 4)
    lines = growth.growth(tmp_path, {}, 1) + processes.memory(tmp_path, {"data.limit": 900}, 1)
    medians = {name: float(median) for name, median, *_ in lines}
    assert len(medians) == 6
    assert medians.pop("planning an epoch of 1,200 rows, seconds") < 60
    assert all(0.3 < ratio < 3 for ratio in medians.values()), medians


def test_the_roofline_is_printed_by_the_command_that_the_page_names():
    assert "python -m benchmarks.roofline" in roofline.PAGE.read_text(encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.roofline", "--device"]
    alone = {"cwd": PROJECT, "env": {"PATH": "/usr/bin:/bin"}, "capture_output": True, "text": True}
    assert "not measured" in subprocess.run([*command, "A100"], **alone).stdout
    unknown = subprocess.run([*command, "T4"], **alone)
    assert (unknown.returncode, "Traceback" in unknown.stderr) == (2, False)
    assert "bf16's peak is known of B200, H200" in unknown.stderr


def test_a_foretold_mfu_stays_below_what_the_device_has():
    encoder = roofline.Encoder()
    for tokens in roofline.WIDTHS:
        reached = [roofline.bounds(encoder, batch, tokens, 1e15, 4.8e12) for batch in roofline.BATCHES]
        assert reached == sorted(reached)  # larger batches never fare worse
        assert all(0 < eager <= graphs < 1 for graphs, eager in reached)
    # Where memory costs nothing, all is arithmetic, and only the scores are computed once more than is counted.
    unbounded, _ = roofline.bounds(encoder, 32, 128, 1e15, 1e30)
    assert 0.98 < unbounded < 1


def test_what_was_measured_stands_beside_what_is_foretold(tmp_path, monkeypatch):
    monkeypatch.setattr(roofline, "MEASURED", tmp_path)
    (tmp_path / "H200.csv").write_text("tokens,batch,mfu\n128,32,0.375\n")
    device = next(device for device in yaml.safe_load(PEAKS_FILE.read_text())["devices"] if device["name"] == "H200")
    shown = {tuple(line[:2]): line[-1] for line in roofline.lines(device)}
    assert shown.pop(("128", "32")) == "38 %"
    assert set(shown.values()) == {"not measured"}


def test_the_page_has_what_is_foretold():
    device = next(device for device in yaml.safe_load(PEAKS_FILE.read_text())["devices"] if device["name"] == "H100")
    page = roofline.PAGE.read_text(encoding="utf-8")
    assert all(f"| {' | '.join(line)} |" in page for line in roofline.lines(device))


def test_time_in_which_any_job_runs_counts_once():
    assert workflow.covered({(10.0, 20.0), (12.0, 14.0), (15.0, 30.0), (40.0, 41.0)}) == 21.0


def test_the_workflow_s_own_share_is_read_from_snakemake_s_notes(benchmark):
    jobs = [read_json(file) for file in (benchmark.folder / ".snakemake" / "metadata").iterdir()]
    ended = max(job["endtime"] for job in jobs)
    share = workflow.own_share(benchmark.folder, benchmark.began, ended)
    assert 0 < share < 0.5
    # A minute more in which nothing ran is the workflow's.
    seconds = ended - benchmark.began
    longer = workflow.own_share(benchmark.folder, benchmark.began, ended + 60)
    assert longer * (seconds + 60) == pytest.approx(share * seconds + 60)
