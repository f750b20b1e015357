"""The whole benchmark, run once by `snakemake --cores all` at a small size, and everything it leaves behind."""

import csv
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.torch import load_file
from sklearn.metrics import accuracy_score, f1_score

from lockstep import paths, workflow
from lockstep.config import reading
from lockstep.data.plan import Plan
from lockstep.files import read_json, seal, write_json
from tests.conftest import HOROVOD, PROFILED, Workplace

ROWS = {"single": 1, "dataparallel": 1, "ddp": 2, "ddp_spawn": 2, "ddp_amp": 2}
ROWS |= {"horovod": 2} if HOROVOD else {}
ROWS |= {"deepspeed": 2, "accelerate": 2, "trainer": 2, "fabric": 2, "fsdp": 2}
EXTEND_DDP = {"ddp", "ddp_spawn", "ddp_amp", "deepspeed", "accelerate", "trainer", "fabric", "fsdp"}
MORE = {"ddp_launch": 2, "ddp_tcp": 3, "single_fp16": 1}
CONFIGURED = ("--cores", "all", "--configfile", "small.yaml")


def run_folder(benchmark, row):
    return benchmark.path(f"results/runs/{row}/n{(ROWS | MORE)[row]}/rep1")


def record(benchmark, row):
    return json.loads((run_folder(benchmark, row) / "record.json").read_text())


@pytest.fixture(params=[*ROWS, *(pytest.param(row, marks=pytest.mark.slow) for row in MORE)])
def trained(request, benchmark, train_more) -> tuple[dict, dict]:
    """The record and ledger of each row."""
    made = train_more(request.param) if request.param in MORE else record(benchmark, request.param)
    with np.load(run_folder(benchmark, request.param) / "ledger.npz") as ledger:
        return made, dict(ledger)


def test_a_row_that_fails_does_not_stop_the_others(benchmark):
    assert benchmark.first_run.returncode == 1
    for row in ROWS:
        assert (run_folder(benchmark, row) / "test" / "report.json").is_file(), row
    failed = json.loads(benchmark.path("results/runs/exploding/n1/rep1/failed.json").read_text())
    assert failed["status"] == "failed"
    assert re.search(r"rank 0, after step \d+ of 9: RunFailed: the loss is (nan|inf) in step \d", failed["reason"])
    assert not benchmark.path("results/runs/exploding/n1/rep1/record.json").exists()
    assert "exploding failed: rank 0" in benchmark.first_run.stdout


def test_the_report_holds_every_row(benchmark):
    with benchmark.path("results/report/summary.csv").open() as stream:
        lines = {line["row"]: line for line in csv.DictReader(stream)}
    assert set(lines) == {*ROWS, "horovod", "exploding"}
    assert HOROVOD or lines["horovod"]["status"] == "unavailable"
    assert lines["exploding"]["status"] == "failed"
    assert "the loss is" in lines["exploding"]["reason"]
    for row, world_size in ROWS.items():
        assert (lines[row]["status"], lines[row]["world_size"]) == ("ok", str(world_size))
    assert float(lines["single"]["speedup"]) == 1
    clock, base = record(benchmark, "ddp")["clock"], record(benchmark, "single")["clock"]
    assert float(lines["ddp"]["speedup"]) == pytest.approx(base["train_seconds"] / clock["train_seconds"])
    assert float(lines["ddp"]["efficiency"]) == pytest.approx(float(lines["ddp"]["speedup"]) / 2)
    html = benchmark.path("results/report/report.html").read_text()
    assert f"Partial: {len(ROWS)} of 12 runs have a result." in html
    assert "synthetic data" in html
    assert all(f'scope="row">{row}<' in html for row in lines)
    markdown = benchmark.path("results/report/report.md").read_text()
    assert "**exploding** failed" in markdown


def test_the_ledgers_are_the_plan(benchmark, trained):
    made, ledger = trained
    plan = Plan.load(benchmark.path(f"results/data/plan/{made['asked']['plan']}.npz"))
    assert made["hashes"]["plan"] == plan.hash
    assert len(ledger["id"]) == len(plan.ids) == len(set(ledger["id"]))  # one epoch, so each id once
    for step in range(plan.steps):
        assert sorted(ledger["id"][ledger["step"] == step]) == sorted(plan.step_ids(step))
    assert set(ledger["rank"]) == set(range(made["world_size"]))


def test_every_row_trains_the_same_model(benchmark, trained):
    made, _ = trained
    single = record(benchmark, "single")
    tolerance = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-3}[made["precision"]]
    assert np.abs(np.subtract(made["losses"], single["losses"])).max() < tolerance
    assert made["losses"][-1] < made["losses"][0]
    assert [scores["step"] for scores in made["dev"]] == [4, 8, 9]
    if made["precision"] == "fp32":
        assert [scores["macro_f1"] for scores in made["dev"]] == pytest.approx(
            [scores["macro_f1"] for scores in single["dev"]]
        )


def test_what_was_asked_is_what_was_trained(trained):
    made, _ = trained
    asked, settings = made["asked"], made["settings"]
    assert settings["optimizer"] == "AdamW"
    assert [group["weight_decay"] for group in settings["groups"]] == [0.01, 0.0]
    assert {group["initial_lr"] for group in settings["groups"]} == {asked["train"]["learning_rate"]}
    assert settings["threads"] == asked["hardware"]["threads"]
    assert settings["precision"] == asked["precision"]
    assert settings["world_size"] == made["world_size"] == asked["hardware"]["processes"]
    assert settings["backend"] == (None if made["world_size"] == 1 else "gloo")
    assert settings["computes_in"] == {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[made["precision"]]
    assert settings["dropout"] == [0.0]
    assert settings["loss_scaling"] == (made["precision"] == "fp16" or made["row"] == "ddp_amp")
    assert len(set(made["seeds"])) == len(made["seeds"]) == made["world_size"]


def test_the_clocks_agree_with_each_other(trained):
    made, _ = trained
    clock = made["clock"]
    assert 0 < clock["step_seconds_median"] < clock["train_seconds"] < clock["total_seconds"] < made["wall_seconds"]
    assert max(clock["setup"].values()) < clock["first_step_seconds"] < clock["total_seconds"]
    assert made["throughput"]["samples_per_second"] == pytest.approx(31 * 9 / clock["train_seconds"])
    assert len(made["memory"]["peak_mb_per_rank"]) == made["world_size"]


def test_a_port_in_use_is_replaced(train_more):
    made = train_more("ddp_tcp")
    assert "port 29555 is in use; another is taken" in made["stderr"]
    (address,) = [word for word in made["command"] if word.startswith("tcp://127.0.0.1:")]
    assert address != "tcp://127.0.0.1:29555"


def test_launchers_are_those_that_were_asked_for(benchmark, train_more):
    assert "torch.distributed.run" in record(benchmark, "ddp")["command"]
    assert "torch.distributed.launch" in train_more("ddp_launch")["command"]
    assert any(word.startswith("file://") for word in record(benchmark, "ddp_spawn")["command"])


def test_converted_models_load_with_transformers_alone(benchmark, tmp_path):
    """In a Python that knows nothing of Lockstep, from another folder; each must predict what its test said."""
    program = """
import json, sys
from transformers import AutoModelForSequenceClassification, AutoTokenizer
for folder, text in json.loads(sys.argv[1]):
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    logits = model(**AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")).logits
    print(json.dumps([model.config.id2label[logits.argmax().item()], logits.softmax(1).max().item()]))
"""
    expected, asked = [], []
    for row in ROWS:
        with (run_folder(benchmark, row) / "test" / "predictions.csv").open(encoding="utf-8-sig") as stream:
            expected.append(list(csv.DictReader(stream))[3])
        asked.append([str(run_folder(benchmark, row) / "model"), expected[-1]["text"]])
    finished = subprocess.run(
        [sys.executable, "-c", program, json.dumps(asked)],
        cwd=tmp_path,
        env=benchmark.environment() | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    for line, answer in zip(expected, finished.stdout.splitlines(), strict=True):
        label, chance = json.loads(answer)
        assert label == line["predicted"]
        assert chance == pytest.approx(float(line[f"p_{label}"]), abs=1e-4)


def test_a_converted_model_holds_the_live_weights(benchmark):
    weights = {row: load_file(run_folder(benchmark, row) / "model" / "model.safetensors") for row in ROWS}
    start = load_file(benchmark.path("results/data/weights/model.safetensors"))
    for row, trained in weights.items():
        assert trained.keys() == start.keys(), row
        assert not all(trained[name].equal(start[name]) for name in start), f"{row} did not train"
    for name in start:
        assert weights["ddp"][name].equal(weights["ddp_spawn"][name]), name
        assert weights["single"][name].equal(weights["dataparallel"][name]), name


def test_a_checkpoint_with_a_flipped_byte_is_not_converted(benchmark, tmp_path):
    """Every checkpoint format would load it without a word."""
    run = tmp_path / "rep1"
    shutil.copytree(run_folder(benchmark, "ddp"), run)
    shutil.rmtree(run / "model")
    checkpoint = run / "native" / "checkpoint.pt"
    data = bytearray(checkpoint.read_bytes())
    data[len(data) // 2] ^= 1
    checkpoint.write_bytes(data)
    finished = benchmark.script("convert", str(run))
    assert finished.returncode == 1
    assert "checkpoint.pt: is missing or has changed since it was written" in finished.stderr
    assert not (run / "model").exists()


def test_a_conversion_to_other_weights_is_caught(benchmark, tmp_path):
    run = tmp_path / "rep1"
    shutil.copytree(run_folder(benchmark, "ddp"), run)
    manifest = json.loads((run / "native" / "manifest.json").read_text())
    (run / "native" / "manifest.json").unlink()
    seal(run / "native", {"weights": "0" * 64, "tied": manifest["tied"]})
    finished = benchmark.script("convert", str(run))
    assert finished.returncode == 1
    assert "the converted weights differ from the live ones" in finished.stderr


@pytest.mark.parametrize("row", ROWS)
def test_every_test_sample_is_predicted_once(benchmark, row):
    test, data = run_folder(benchmark, row) / "test", json.loads(benchmark.path("results/data/data.json").read_text())
    report = json.loads((test / "report.json").read_text())
    with (test / "predictions.csv").open(encoding="utf-8-sig") as stream:
        lines = list(csv.DictReader(stream))
    assert len({line["row"] for line in lines}) == len(lines) == report["support"] == data["splits"]["test"]["texts"]
    truth, predicted = [line["truth"] for line in lines], [line["predicted"] for line in lines]
    assert report["accuracy"] == pytest.approx(accuracy_score(truth, predicted))
    assert report["macro_f1"] == pytest.approx(
        f1_score(truth, predicted, average="macro", labels=data["labels"], zero_division=0)
    )
    assert np.sum(report["confusion_matrix"]) == len(lines)
    for line in lines:
        chances = [float(line[f"p_{label}"]) for label in data["labels"]]
        assert sum(chances) == pytest.approx(1, abs=1e-5)
        assert data["labels"][int(np.argmax(chances))] == line["predicted"]
    assert all(name in (test / "report.txt").read_text() for name in ["macro avg", *data["labels"]])


def test_predictions_put_the_same_texts_through_every_model(benchmark):
    with benchmark.path("results/predict/predictions.csv").open(encoding="utf-8-sig") as stream:
        lines = list(csv.DictReader(stream))
    assert list(lines[0]) == ["text", "truth", *ROWS]
    assert [line["truth"] for line in lines] == ["高兴", "高兴"]
    with (run_folder(benchmark, "ddp") / "test" / "predictions.csv").open(encoding="utf-8-sig") as stream:
        tested = {line["text"]: line["predicted"] for line in csv.DictReader(stream)}
    assert all(line["ddp"] == tested[line["text"]] for line in lines)


def test_what_a_run_says_of_itself(benchmark):
    folder = run_folder(benchmark, "ddp")
    environment = json.loads((folder / "env.json").read_text())
    assert environment["packages"]["torch"]
    assert environment["variables"]["OMP_NUM_THREADS"] == "1"
    assert set(environment["packages"]) >= {"torch", "transformers", "snakemake", "deepspeed", "accelerate", "horovod"}
    assert len(environment["config_hash"]) == 64
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    assert {event["key"] for event in events} == {"run_start", "eval", "checkpoint", "run_stop"}
    log = (folder / "run.log").read_text()
    assert "step 9/9\n" in log
    assert "step 4/9: dev loss" in log
    manifest = json.loads(benchmark.path("results/manifest.json").read_text())
    assert set(manifest["rows"]) == {*ROWS, "horovod", "exploding"}
    assert manifest["command"].startswith("snakemake --cores all")


def test_no_file_is_for_its_owner_alone(benchmark):
    """safetensors makes such, and users share a folder of results by the umask that they have."""
    usual = benchmark.path("small.yaml").stat().st_mode & 0o077
    modes = {file: file.stat().st_mode & 0o077 for file in benchmark.path("results").rglob("*") if file.is_file()}
    assert [str(file) for file, mode in modes.items() if mode != usual] == []


def test_no_shared_memory_outlives_the_runs(benchmark):
    """DeepSpeed's ranks share 66 MiB each, which it leaves in /dev/shm."""

    def left() -> list[str]:
        names = [file.name for file in Path("/dev/shm").iterdir() if file.stat().st_ctime > benchmark.began]
        names = [name for name in names if name.startswith(("deepspeed", "torch_", "gloo"))]
        # Scripts of users, which other tests start, leave theirs; the port is in the name.
        return [name for name in names if not name.startswith("deepspeed") or name.split("_")[-2] in ports]

    commands = [" ".join(read_json(file)["command"]) for file in benchmark.path("results").rglob(paths.RECORD)]
    ports = {port for command in commands for port in re.findall(r"--master[-_]port[ =](\d+)", command)}
    assert ports, "which ranks of DeepSpeed had"
    end = time.monotonic() + 10
    while left() and time.monotonic() < end:  # the ranks of another test, beside this one, have theirs for a moment
        time.sleep(0.5)
    assert not left()


def test_single_needs_no_retraining_and_the_failed_row_is_tried_again(benchmark):
    planned = benchmark.snakemake("-n", *CONFIGURED)
    again = {"train_exploding_1", "evaluate", "predict", "report", "all"}
    assert jobs(planned) == dict.fromkeys(again, 1)
    nothing = benchmark.snakemake("-n", "ddp", *CONFIGURED)
    assert "Nothing to be done" in nothing.stdout + nothing.stderr


def test_snakemake_s_own_report_is_made_although_a_row_failed(benchmark, tmp_path):
    file = tmp_path / "report.zip"
    for settings in (CONFIGURED, ()):  # also by the settings of another command, whose rows were never trained
        finished = benchmark.snakemake("--report", str(file), *settings)
        assert finished.returncode == 0, finished.stderr
        assert file.stat().st_size > 0
        file.unlink()


def test_a_forced_row_refreshes_only_what_follows_from_it(benchmark):
    planned = jobs(benchmark.snakemake("-n", "ddp", "single", "-R", "train_ddp_1", *CONFIGURED))
    assert planned == {"train_ddp_1": 1, "evaluate": 1, "ddp": 1}


def test_more_repetitions_add_runs_and_repeat_none(benchmark):
    planned = jobs(benchmark.snakemake("-n", "ddp", "single", "--config", "repeats=2", *CONFIGURED))
    assert planned == {"train_ddp_2": 1, "train_single_2": 1, "evaluate": 2, "ddp": 1, "single": 1}


def test_rows_are_trained_in_the_order_that_the_seed_gives(benchmark):
    order = [row.name for row, _ in reading.read([benchmark.path("results/config.yaml")]).order]
    began = {row: record(benchmark, row)["started"] for row in ROWS}
    assert sorted(began, key=began.get) == [row for row in order if row in ROWS]


@pytest.mark.slow
def test_every_row_is_profiled(benchmark):
    """The parts make up the step, and a row that talks to no other process has nothing to wait for."""
    done = benchmark.snakemake(*(f"profile_{row}" for row in ROWS), "--cores", "all", *PROFILED)
    assert done.returncode == 0, done.stderr
    for row, processes in ROWS.items():
        folder = benchmark.path(f"results/profile/{row}/n{processes}/rep1")
        profile = json.loads((folder / "profile.json").read_text())
        assert set(profile["seconds"]) == {"data", "forward", "backward", "optimizer", "communication", "idle"}
        assert all(seconds >= -1e-9 for seconds in profile["seconds"].values())
        assert profile["seconds"]["forward"] > 0 < profile["seconds"]["backward"]
        assert (profile["seconds"]["communication"] > 0) == (processes > 1), row
        assert profile["step_seconds"] > 0 < profile["alone_step_seconds"]
        with gzip.open(folder / "trace.json.gz") as trace:
            assert json.load(trace)["traceEvents"]
        assert not (folder / "native").exists()


def test_what_a_failure_left_untested_is_tested_for_the_report(benchmark, tmp_path, monkeypatch):
    """With `repeats: auto` runs are tested once all is decided, which a row that fails prevents."""
    for part in ("workflow", "results/data"):
        (tmp_path / part).parent.mkdir(exist_ok=True)
        (tmp_path / part).symlink_to(benchmark.path(part))
    shutil.copy(benchmark.path("results/config.yaml"), tmp_path / "results")
    run = tmp_path / "results/runs/single/n1/rep1"
    shutil.copytree(run_folder(benchmark, "single"), run)
    tested = run / "test" / "report.json"
    before = tested.read_text()
    shutil.rmtree(tested.parent)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", benchmark.environment()["PATH"])
    monkeypatch.setattr(workflow, "stamps", lambda results: [])
    monkeypatch.setattr(workflow, "run_script", lambda *_: None)  # the report itself is another test's
    workflow.report_what_there_is(reading.read([Path("results/config.yaml")]))
    assert tested.read_text() == before


def test_a_repetition_with_the_same_weights_takes_the_test_over(benchmark, tmp_path):
    for repeat in (1, 2):
        shutil.copytree(run_folder(benchmark, "ddp"), tmp_path / f"ddp/n2/rep{repeat}")
    shutil.rmtree(tmp_path / "ddp/n2/rep2/test")
    shutil.rmtree(tmp_path / "ddp/n2/rep2/model")
    said = benchmark.script("evaluate", str(tmp_path / "ddp/n2/rep2"))
    assert "the same weights, to the last bit, as" in said.stdout
    for file in ("test/report.json", "test/predictions.csv", "model/model.safetensors"):
        assert (tmp_path / "ddp/n2/rep2" / file).read_bytes() == (tmp_path / "ddp/n2/rep1" / file).read_bytes()
    manifest = tmp_path / "ddp/n2/rep1/native/manifest.json"
    write_json(manifest, json.loads(manifest.read_text()) | {"weights": 64 * "0"})  # as if it had ended elsewhere
    assert "the same weights" not in benchmark.script("evaluate", str(tmp_path / "ddp/n2/rep2")).stdout


@pytest.mark.slow
def test_again_repeats_whole_blocks_with_their_own_configuration(benchmark, tmp_path):
    place = Workplace(Path(shutil.copytree(benchmark.folder, tmp_path / "copy")))
    asked = place.path("results/config.yaml")
    settings = yaml.safe_load(asked.read_text())
    rows = {name: settings["rows"][name] for name in ("single", "ddp")}  # the others were dropped since
    asked.write_text(yaml.safe_dump(settings | {"rows": rows, "profile": {"steps": 0}, "retries": 0}))
    before = {}
    for file in place.path("results/runs").glob("*/*/*/record.json"):
        made = json.loads(file.read_text())
        watch = made["watch"] | {"disturbed": ["a GPU was throttled"] if made["row"] == "ddp" else []}
        before[file.parent] = made | {"watch": watch, "wall_seconds": 99.0}
        write_json(file, before[file.parent])
    said = place.script("again")
    assert "runs/ddp/n2/rep1: a GPU was throttled\n" in said.stdout
    assert f"1 of 1 blocks are repeated, with 2 of {len(before)} runs" in said.stdout
    after = {folder: json.loads((folder / "record.json").read_text()) for folder in before}
    repeated = [after[folder] for folder in after if after[folder]["wall_seconds"] != 99.0]
    assert {run["row"] for run in repeated} == {"single", "ddp"}
    assert len({run["session"] for run in repeated}) == 1
    assert all(after[folder]["losses"] == before[folder]["losses"] for folder in after)
    report = json.loads(place.path("results/report/summary.json").read_text())
    assert [row["row"] for row in report["rows"]] == ["single", "ddp"]


def test_a_disturbed_run_is_repeated_at_once(benchmark):
    """As often as is asked for; its record is of the last attempt, and tells of those before."""
    attempts = benchmark.path("attempts.py")
    attempts.write_text(
        "import sys\n"
        "from dataclasses import replace\n"
        "from pathlib import Path\n"
        "sys.path.insert(0, 'workflow/scripts')\n"
        "from lockstep.config import reading\n"
        "from lockstep.run import runs, watcher\n"
        "verdicts = iter([['noise'], ['more noise'], []])\n"
        "judge = watcher.judge\n"
        "watcher.judge = lambda *a: replace(judge(*a), disturbed=next(verdicts))\n"
        "asked = reading.read([Path('results/config.yaml')], ['retries=2', 'rows.thrice.strategy=single'])\n"
        "runs.run(asked, asked.rows['thrice'], 1, Path('results'))\n"
    )
    said = benchmark.run("python", "attempts.py")
    assert said.stdout == "thrice: noise; it is repeated\nthrice: more noise; it is repeated\n", said.stderr
    made = json.loads(benchmark.path("results/runs/thrice/n1/rep1/record.json").read_text())
    assert [attempt["disturbed"] for attempt in made["disturbed_before"]] == [["noise"], ["more noise"]]
    assert made["watch"]["disturbed"] == []
    assert made["started"] > made["disturbed_before"][-1]["started"]


def test_the_optimizer_that_steps_is_the_fused_one(benchmark):
    """As every row asks for: read from the live groups, as a framework's wrapper has defaults of its own."""
    assert {row: record(benchmark, row)["settings"]["fused"] for row in ROWS} == dict.fromkeys(ROWS, True)


def test_ranks_open_their_windows_together(benchmark):
    """The first to come waits for the others before its clock starts, not after."""
    for row, processes in ROWS.items():
        opened = [
            json.loads((run_folder(benchmark, row) / "ranks" / f"{rank}.json").read_text())["clock"]["window"][0]
            for rank in range(processes)
        ]
        assert max(opened) - min(opened) < 0.25, row


def test_again_says_where_there_is_nothing(benchmark, tmp_path):
    said = benchmark.script("again", "--results", str(tmp_path))
    assert (said.returncode, said.stderr.count("error: ")) == (2, 1)
    assert "holds no run with a record" in said.stderr


@pytest.mark.parametrize(
    ("file", "trains"),
    [
        ("workflow/scripts/lockstep/strategies/ddp.py", {f"train_{row}_1" for row in EXTEND_DDP}),
        ("workflow/scripts/lockstep/strategies/dataparallel.py", {"train_dataparallel_1"}),
        ("workflow/scripts/lockstep/rank/clock.py", {f"train_{row}_1" for row in ROWS}),
        ("workflow/scripts/lockstep/model/models.py", {f"train_{row}_1" for row in ROWS}),  # `prepare` needs it, too
        ("workflow/scripts/lockstep/errors.py", set()),
        ("workflow/report/report.html.j2", set()),
        ("workflow/scripts/lockstep/report/charts.py", set()),
    ],
)
def test_editing_code_reruns_what_depends_on_it(benchmark, file, trains):
    path = benchmark.path(file)
    before, written = path.read_text(), path.stat().st_mtime_ns
    time.sleep(0.01)
    path.write_text(before + "\n\n")
    try:
        targets = [f"results/runs/{row}/n{n}/rep1/test/report.json" for row, n in ROWS.items()]
        planned = jobs(benchmark.snakemake("-n", *targets, *CONFIGURED))
    finally:
        path.write_text(before)
        os.utime(path, ns=(written, written))  # else it counts as edited after the rows were trained
    assert {job for job in planned if job.startswith("train_")} == trains
    assert planned.get("evaluate", 0) >= len(trains)


def test_changing_a_row_retrains_that_row_alone(benchmark):
    targets = [f"results/runs/{row}/n{n}/rep1/record.json" for row, n in ROWS.items()]
    changed = "rows={ddp: {precision: bf16}}"
    planned = jobs(benchmark.snakemake("-n", *targets, "--config", changed, *CONFIGURED))
    assert planned == {"train_ddp_1": 1}


def jobs(planned: subprocess.CompletedProcess) -> dict[str, int]:
    """The table of jobs that Snakemake prints."""
    assert planned.returncode == 0, planned.stderr
    output = planned.stdout + planned.stderr
    table = output.split("Job stats:")[1].split("total")[0] if "Job stats:" in output else ""
    return {name: int(count) for name, count in re.findall(r"^(\w+) +(\d+)$", table, re.MULTILINE)}
