"""What is made again, and what is not: settings that decide nothing, lost files, a `prepare` that fails."""

import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from lockstep.config import reading
from lockstep.data import plan, prepared
from lockstep.files import read_json, write_json
from lockstep.run import runs
from tests.conftest import Workplace
from tests.test_benchmark import CONFIGURED, jobs

NOTHING = "Nothing to be done"


@pytest.fixture
def place(benchmark, tmp_path) -> Workplace:
    """A copy of the benchmark, to be spoilt."""
    return Workplace(Path(shutil.copytree(benchmark.folder, tmp_path / "copy")))


def test_what_decides_no_result_trains_nothing_again(benchmark):
    done = benchmark.snakemake("-n", "ddp", "--config", "hardware={timeout: 99, port: 29600}", *CONFIGURED)
    assert NOTHING in done.stdout + done.stderr


PARTS = ("weights/model.safetensors", "tokenizer/tokenizer.json")


@pytest.mark.parametrize(
    "part", ["dataset/train/*.arrow", *(pytest.param(part, marks=pytest.mark.slow) for part in PARTS)]
)
def test_a_lost_file_is_made_again_and_no_row_is_trained_for_it(place, part):
    (lost,) = place.path("results/data").glob(part)
    about, name = read_json(place.path("results/data/data.json")), str(lost.relative_to(place.folder))
    lost.unlink()
    configs = [f"--config={file}" for file in ("small.yaml", "more.yaml")]
    refused = place.script("launch", *configs, "--row", "single_fp16")
    assert refused.returncode == 2
    assert refused.stderr == f"error: {name} is gone or changed. {prepared.MAKE_DATA}\n"
    assert jobs(place.snakemake("-n", "ddp", *CONFIGURED)) == {"prepare": 1, "plan": 1, "ddp": 1}
    made = place.snakemake("ddp", *CONFIGURED)
    assert made.returncode == 0, made.stderr
    assert lost.is_file()
    assert read_json(place.path("results/data/data.json")) == about
    after = place.snakemake("-n", "ddp", *CONFIGURED)
    assert NOTHING in after.stdout + after.stderr


def test_a_damaged_file_is_told_before_anything_starts(place):
    """It is there, so Snakemake would make nothing; and a row that is trained on it would fail, its last run gone."""
    (file,) = place.path("results/data").glob("dataset/train/*.arrow")
    file.write_bytes(file.read_bytes()[:100])
    refused = place.snakemake("single", *CONFIGURED, "-R", "train_single_1")
    assert refused.returncode != 0
    said = (
        f"error: {file.relative_to(place.folder)}: has changed since it was written. Remove it, and it is made again."
    )
    assert said in refused.stderr
    assert place.path("results/runs/single/n1/rep1/record.json").is_file()
    planned = place.script("plan", "--config=small.yaml")
    assert (planned.returncode, planned.stderr.count("\n")) == (2, 1)
    assert "is gone or changed. Remove it" in planned.stderr


@pytest.mark.slow
def test_what_a_failure_reported_is_made_again_when_all_is_well(place):
    """Its report is of settings that may be gone by then, and newer than all that Snakemake would make it from."""
    stamps = [place.path(f"results/{part}/.complete") for part in ("predict", "report")]
    for stamp in stamps:
        stamp.touch()
    failed = place.snakemake("--config", "train={global_batch: 5000}", *CONFIGURED)
    assert failed.returncode == 1
    assert not any(stamp.exists() for stamp in stamps)
    planned = place.snakemake("-n", *CONFIGURED)
    (inputs,) = re.findall(r"rule all:\n    input: (.*)", planned.stdout + planned.stderr)
    assert {"results/predict/.complete", "results/report/.complete"} <= set(inputs.split(", "))


def test_a_prepare_that_fails_leaves_everything_as_it_was(place):
    """Once the configuration is put back, no row is trained again."""
    place.path("bad.csv").write_text("text,label\nhello,bad\n", encoding="utf-8")
    kept = ("data/data.json", "config.yaml", "manifest.json", "report/summary.csv", "runs/ddp/n2/rep1/record.json")
    before = [place.path(f"results/{file}").read_bytes() for file in kept]
    failed = place.snakemake("--config", "data={path: bad.csv, labels: [bad, good]}", *CONFIGURED)
    assert failed.returncode == 1
    assert "bad.csv: too few texts with the label bad" in failed.stderr
    assert [place.path(f"results/{file}").read_bytes() for file in kept] == before
    back = place.snakemake("-n", "ddp", "single", *CONFIGURED)
    assert NOTHING in back.stdout + back.stderr


def test_what_can_not_be_written_removes_no_older_result(tmp_path):
    """Numbers are refused long before; whatever else may not go into settings.json."""
    row = reading.parse({"rows": {"x": {"strategy": "single"}}}).rows["x"]
    odd = replace(row, train=replace(row.train, clip=math.nan))
    plan.make(np.array([3, 4]), global_batch=1, epochs=1, seed=0, batching="plain").save(
        tmp_path / "data" / "plan" / f"{row.plan_name}.npz"
    )
    write_json(tmp_path / "data" / "data.json", {})
    older = tmp_path / row.folder(1) / "record.json"
    write_json(older, {})
    with pytest.raises(ValueError, match="JSON"):
        runs.run(reading.parse({}), odd, 1, tmp_path)
    assert older.is_file()


def test_again_leaves_out_a_disturbed_run_of_a_row_that_was_dropped(place):
    for file in place.path("results/runs").glob("*/*/*/record.json"):
        made = read_json(file)
        write_json(
            file, made | {"watch": made["watch"] | {"disturbed": ["a GPU was throttled"] * (made["row"] == "ddp")}}
        )
    kept = place.path("results/config.yaml")
    asked = yaml.safe_load(kept.read_text(encoding="utf-8"))
    kept.write_text(yaml.safe_dump(asked | {"rows": asked["rows"] | {"ddp": None}}), encoding="utf-8")
    said = place.script("again")
    assert said.returncode == 0, said.stderr
    assert "runs/ddp/n2/rep1: a GPU was throttled; but results/config.yaml has no such run any more" in said.stdout
    assert "0 of " in said.stdout
