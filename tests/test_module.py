"""Lockstep in another workflow: as a module of its Snakefile, and as snakedeploy puts it there."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PROJECT, Workplace

ROWS = {"single": {"strategy": "single"}, "ddp": {"strategy": "ddp"}}
CONFIG = {
    "data": {"limit": 700},
    "model": {"hidden_size": 32, "layers": 1},
    "train": {"epochs": 1, "max_steps": 6, "eval_every": 3},
    "hardware": {"device": "cpu", "processes": 2, "oversubscribe": True},
    "profile": {"steps": 0},
    "repeats": 1,
    "retries": 0,
    "rows": ROWS,
}
MODULE = """
module lockstep:
    snakefile: "{snakefile}"
    config: {config}
{more}
use rule * from lockstep as lockstep_*
"""
MINE = """
rule mine:
    input: "results/runs/ddp/n2/rep1/test/report.json"
    output: "mine.json"
    shell: "cp {input} {output}"
"""


def workflow(folder, before: str = "", config: dict = CONFIG, more: str = "", snakefile=None) -> Workplace:
    """Another's workflow in `folder`, which takes Lockstep as a module."""
    text = MODULE.format(snakefile=snakefile or PROJECT / "workflow" / "Snakefile", config=config, more=more)
    (folder / "Snakefile").write_text(before + text, encoding="utf-8")
    return Workplace(folder)


def test_its_rules_are_there_under_the_other_workflow_s_names(tmp_path):
    listed = workflow(tmp_path, MINE).snakemake("--list-rules").stdout.split()
    assert {"mine", "lockstep_ddp", "lockstep_train_ddp_1", "lockstep_prove_ddp", "lockstep_all"} <= set(listed)


def test_the_other_workflow_says_what_is_made_where_nothing_is_named(tmp_path):
    (tmp_path / "first").mkdir()
    (tmp_path / "last").mkdir()
    mine = workflow(tmp_path / "first", MINE).snakemake("-n")
    assert "rule mine:" in mine.stdout
    assert "lockstep_predict" not in mine.stdout
    assert "lockstep_all" in workflow(tmp_path / "last").snakemake("-n").stdout


def test_a_prefix_is_refused(tmp_path):
    finished = workflow(tmp_path, more='    prefix: "elsewhere"\n').snakemake("-n")
    assert finished.returncode == 2
    assert "error: module: Lockstep accepts no prefix" in finished.stderr


def test_a_configuration_without_rows_is_refused(tmp_path):
    finished = workflow(tmp_path, config=CONFIG | {"rows": {"ddp": None}}).snakemake("-n")
    assert finished.returncode == 2
    assert "rows: no row is left" in finished.stderr


def test_a_snakefile_without_its_clone_says_so(tmp_path):
    shutil.copy(PROJECT / "Snakefile", tmp_path / "alone.smk")
    finished = workflow(tmp_path, snakefile=tmp_path / "alone.smk").snakemake("-n")
    assert finished.returncode == 2
    assert "alone.smk is alone, but Lockstep is more than its Snakefile. Clone Lockstep" in finished.stderr


@pytest.mark.slow
def test_a_row_is_trained_and_what_failed_is_reported(tmp_path):
    """Where a row fails, the report is written over what there is, as in Lockstep itself."""
    config = CONFIG | {"rows": ROWS | {"exploding": {"strategy": "single", "learning_rate": 1e30, "clip": 0}}}
    place = workflow(tmp_path, MINE, config)
    finished = place.snakemake("--cores", "2", "mine")
    assert finished.returncode == 0, finished.stderr
    assert json.loads(place.path("mine.json").read_text())["support"] > 0
    (line, *_) = place.path("results/journal.jsonl").read_text().splitlines()
    assert json.loads(line)["what"] == "request"
    assert "Nothing to be done" in place.snakemake("--cores", "2", "mine").stderr
    finished = place.snakemake("--cores", "2", "--keep-going", "lockstep_exploding", "lockstep_single")
    assert finished.returncode == 1
    page = place.path("results/report/report.html").read_text(encoding="utf-8")
    assert "exploding" in page
    assert "the loss is" in page


@pytest.mark.slow
@pytest.mark.ci
def test_snakedeploy_puts_it_into_a_folder_of_its_own(tmp_path):
    pytest.importorskip("snakedeploy", reason="needs: pip install snakedeploy==0.17.1, which only this uses")
    clone, mine = tmp_path / "clone", tmp_path / "mine"
    subprocess.run(["git", "clone", "--quiet", PROJECT, clone], check=True)
    deploy = [Path(sys.executable).with_name("snakedeploy"), "deploy-workflow", clone, mine, "--branch", "main"]
    subprocess.run([*map(str, deploy), "--name", "lockstep"], check=True, capture_output=True)
    snakefile = mine / "workflow" / "Snakefile"
    text = snakefile.read_text(encoding="utf-8")
    assert '"workflow/Snakefile"' in text
    snakefile.write_text(text.replace('"workflow/', f'"{clone}/workflow/'), encoding="utf-8")
    planned = Workplace(mine).snakemake("-n")
    assert planned.returncode == 0, planned.stderr
    assert "train_fsdp_1" in planned.stdout
