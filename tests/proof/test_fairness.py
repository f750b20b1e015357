"""The rules of a fair comparison: a folder that keeps them has no breach, and every violation is reported."""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from lockstep import files, paths
from lockstep.config.reading import read
from lockstep.errors import BadInput
from lockstep.proof import fairness
from lockstep.report import comparison, page, summary
from lockstep.run import journal
from tests import made

ROWS = ("single", "ddp", "fsdp")


@pytest.fixture
def results(benchmark, tmp_path) -> Path:
    """Three rows of the benchmark, each three times in blocks, undisturbed, from a clean tree: a fair comparison."""
    whole, folder = benchmark.path("results"), tmp_path / "results"
    shutil.copytree(whole / "data", folder / "data", ignore=shutil.ignore_patterns("weights", "dataset"))
    shutil.copytree(whole / "parity", folder / "parity", ignore=shutil.ignore_patterns("model", "ranks"))
    for place, row in enumerate(ROWS):
        (run,) = (whole / "runs" / row).glob("n*/rep1")
        for repeat in (1, 2, 3):
            copy = folder / "runs" / row / run.parent.name / f"rep{repeat}"
            shutil.copytree(run, copy, ignore=shutil.ignore_patterns("native", "watch.jsonl"))
            started = f"2026-01-01T00:{10 * repeat + place:02}:00+00:00"
            quiet = {"samples": 0, "others_cores": 0.0, "disturbed": []}
            clock = files.read_json(copy / "record.json")["clock"] | {"stall_seconds": 0.0}
            change(copy, repeat=repeat, started=started, watch=quiet, clock=clock)
            environment = files.read_json(copy / "env.json")
            files.write_json(copy / "env.json", environment | {"changed": False})
    write_journal(folder)
    shutil.copy(
        whole / "config.yaml", tmp_path / "config.yaml"
    )  # not in the folder, where rows would be checked against it
    return folder


def write_journal(results: Path) -> None:
    """Write a journal by which all files in `results` are unchanged."""
    paths.journal_file(results).unlink(missing_ok=True)
    journal.note(results, "request", rows=list(ROWS))
    journal.note(results, "preparation", results / "data", ("data.json",))
    for file in sorted(results.glob("runs/*/*/*/record.json")):
        journal.note(results, "run", file.parent, journal.OF_A_RUN)
        journal.note_test(file.parent)
    for file in sorted(results.glob("parity/*/*/*/verdict.json")):
        journal.note(results, "proof", file.parent, ("verdict.json", "env.json"))


def change(folder: Path, **values) -> None:
    files.write_json(folder / "record.json", files.read_json(folder / "record.json") | values)


def run(results: Path, row: str = "ddp", repeat: int = 2) -> Path:
    (folder,) = (results / "runs" / row).glob(f"n*/rep{repeat}")
    return folder


def test_a_fair_comparison_has_no_breach(results):
    assert fairness.check(results) == fairness.Findings(runs=9, rows=3, breaches=[])


def test_each_repetition_may_have_a_plan_of_its_own_in_which_its_rows_agree(tmp_path):
    """As with vary_seed."""
    records = {}
    for place, (repeat, row) in enumerate(itertools.product((1, 2), ("single", "ddp"))):
        folder = tmp_path / paths.run_name(row, 1, repeat)
        files.write_json(folder / paths.ENVIRONMENT, {"packages": {}})
        about = {"started": f"2026-01-01T00:{place:02}:00+00:00", "hashes": {"plan": 64 * str(repeat)}}
        settings = {"optimizer": "AdamW", "groups": [], "dropout": [0.1]}
        records[folder] = made.record(row=row, repeat=repeat, settings=settings, **about)
    assert list(fairness._together(records, tmp_path)) == []
    records[folder].hashes["plan"] = 64 * "1"
    assert list(fairness._together(records, tmp_path)) == [
        (str(folder), "its plan differs from the rest of the closed division")
    ]


def test_an_empty_folder_is_told(tmp_path):
    with pytest.raises(BadInput, match="holds no run with a record"):
        fairness.check(tmp_path)


def disturb(folder):
    change(folder, watch={"samples": 0, "others_cores": 1.0, "disturbed": ["other processes used 1.00 of 2 CPU cores"]})


def flip_a_byte(folder):
    weights = bytearray((folder / "model" / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model" / "model.safetensors").write_bytes(weights)


def lose_a_sample(folder):
    with np.load(folder / "ledger.npz") as arrays:
        np.savez(folder / "ledger.npz", **{name: array[:-1] for name, array in arrays.items()})


def change_setting(folder, name, value):
    change(folder, settings=files.read_json(folder / "record.json")["settings"] | {name: value})


def change_environment(folder, name, value):
    files.write_json(folder / "env.json", files.read_json(folder / "env.json") | {name: value})


def change_clock(folder, **values):
    change(folder, clock=files.read_json(folder / "record.json")["clock"] | values)


def change_verdict(folder, **values):
    (file,) = (folder.parents[3] / "parity" / "ddp").glob("n*/rep1/verdict.json")
    files.write_json(file, files.read_json(file) | values)
    write_journal(folder.parents[3])


def prove_by_another_torch(folder):
    (file,) = (folder.parents[3] / "parity" / "ddp").glob("n*/rep1/env.json")
    environment = files.read_json(file)
    files.write_json(file, environment | {"packages": environment["packages"] | {"torch": "1.0"}})
    write_journal(folder.parents[3])


def publish(folder, **values):
    """Write a report that contradicts ddp's records, with its hash in the journal."""
    results = folder.parents[3]
    made = summary.gather(read([results.parent / "config.yaml"], ["repeats=3"]), results)
    rows = [row | (values if row["row"] == "ddp" else {}) for row in made.rows]
    files.write_json(results / "report" / "summary.json", made.as_json() | {"rows": rows})
    journal.note(results, "report", results / "report", ("summary.json",))


def watched_others(folder):
    """The watcher's file has the disturbance, but the record was edited."""
    sample = {"begin": 0, "end": 1e9, "others_cores": 1.5, "cpu_mhz": None, "cpu_celsius": None}
    (folder / "watch.jsonl").write_text(json.dumps(sample | {"gpus": [], "others_on_gpus": []}) + "\n")


def record(folder: Path) -> dict:
    return files.read_json(folder / "record.json")


def change_hash(folder, name):
    change(folder, hashes=record(folder)["hashes"] | {name: 64 * "0"})


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (disturb, "it was disturbed: other processes used 1.00 of 2 CPU cores"),
        (flip_a_byte, "its model is not as it was written: "),
        (lose_a_sample, "its ledger is wrong: the ledger differs from the plan in step 9"),
        (lambda folder: (folder / "ledger.npz").unlink(), "its ledger is wrong"),
        (lambda folder: change_setting(folder, "threads", 2), "threads: 1 was asked for, but 2 was used"),
        (lambda folder: change_setting(folder, "dropout", [0.5]), "its dropout differs from the rest"),
        (lambda folder: change_environment(folder, "cpu", "Z80"), "cpu is Z80"),
        (lambda folder: change_environment(folder, "packages", {"torch": "1.0", "horovod": None}), "torch is 1.0, but"),
        (lambda folder: change_environment(folder, "changed", True), "files that differ from their commit"),
        (lambda folder: change_hash(folder, "weights"), "other weights than those that exist now"),
        (lambda folder: change_hash(folder, "plan"), "it trained another plan"),
        (
            lambda folder: change(folder, started="2026-01-01T00:20:00+00:00", wall_seconds=99),
            "it ran at the same time as",
        ),
        (lambda folder: change(folder, losses="none"), "is not a valid record: $.losses"),
        (lambda folder: (folder / "record.json").write_text('{"row": '), "is damaged"),
        (lambda folder: (folder / "env.json").unlink(), "not all of it can be checked"),
        (lambda folder: (folder / "ledger.npz").write_bytes(b"PK"), "not all of it can be checked"),
        (lambda folder: change_clock(folder, train_seconds=0.5), "not its work divided by its training time"),
        (lambda folder: change_clock(folder, train_seconds=0.5), "not that of its slowest rank"),
        (lambda folder: change_clock(folder, train_seconds=1e300), "do not fit into"),
        (lambda folder: change(folder, row="fsdp"), "its record is that of fsdp"),
        (lambda folder: (folder / "failed.json").write_text("{}"), "it failed"),
        (watched_others, "it was disturbed: other processes took 1.50 of the 2 CPU cores"),
        (lambda folder: change(folder, session="another"), "repetition 2: its runs are of 2 sessions"),
        (lambda folder: change(folder, started="2026-01-01T02:00:00+00:00"), "repetition 2: its runs took "),
        (
            lambda folder: change(folder, losses=[0.1, *record(folder)["losses"][1:]]),
            "record.json was changed after the run that left it",
        ),
        (lambda folder: (folder / "ranks" / "0.json").unlink(), "ranks/0.json, which the run left, is gone"),
        (
            lambda folder: files.write_json(folder / "test" / "report.json", {"accuracy": 0.99}),
            "test/report.json was changed after the test that left it",
        ),
        (lambda folder: change_environment(folder, "variables", {"OMP_NUM_THREADS": "7"}), "OMP_NUM_THREADS was 7, "),
        (watched_others, "its record counts 0 samples of the machine, but there are 1"),
        (
            lambda folder: change_verdict(folder, distances={"losses": 0.5, "norm": 0, "update": 0}),
            "losses say otherwise",
        ),
        (
            lambda folder: change_verdict(folder, fp64={"weights": 1e-6}),
            "its verdict is equal, but its weights in fp64",
        ),
        (
            lambda folder: change_verdict(folder, first_gradients={"differing": 2, "weights": 9}),
            "its verdict is equal, but its first gradients in fp64 say otherwise",
        ),
        (prove_by_another_torch, "ddp: it was proven with torch 1.0, but timed with "),
        (lambda folder: shutil.rmtree(folder.parents[1]), "ddp: it was asked for, but no run of it has a record"),
        (
            lambda folder: (folder.parents[3] / "journal.jsonl").unlink(),
            "does not exist, so changes to files can't be found",
        ),
        (
            lambda folder: publish(folder, train_seconds=0.001),
            "ddp: the report has train_seconds 0.001, but its records",
        ),
        (lambda folder: publish(folder, macro_f1=0.99), "ddp: the report has macro_f1 0.99, but its records"),
        (lambda folder: publish(folder, startup_seconds=0.5), "ddp: the report has startup_seconds 0.5, but its"),
        (lambda folder: publish(folder, accuracy=1.2), "ddp: the report has accuracy 1.2, which is not from 0 to 1"),
        (shutil.rmtree, "ddp: repetition 2 is missing, so its blocks are incomplete"),
        (lambda folder: shutil.rmtree(folder.parents[3] / "parity" / "ddp"), "it was not compared with the reference"),
    ],
)
def test_every_breach_is_told(results, spoil, told):
    spoil(run(results))
    assert any(told in f"{where}: {what}" for where, what in fairness.check(results).breaches)


def test_the_command_exits_with_1_where_there_is_a_breach(results, run_script):
    code, said, _ = run_script("check", str(results))
    assert (code, said.splitlines()[0]) == (0, "9 runs of 3 rows: no breaches")
    assert "Files can't show" in said
    disturb(run(results))
    code, said, _ = run_script("check", str(results))
    assert code == 1
    assert "2 breaches" in said


def test_records_of_other_settings_are_told(results, benchmark):
    """They are those of report.py. Values that the configuration leaves to the machine may differ between machines."""
    asked = read([benchmark.path("results/config.yaml")]).source
    for hardware, told in (({"threads": "auto", "timeout": 5}, False), ({"threads": 7}, True)):
        files.write_text(results / "config.yaml", json.dumps(asked | {"hardware": asked["hardware"] | hardware}))
        breaches = fairness.check(results).breaches
        said = "it was made with other settings: hardware.threads 1, now 7"
        assert [what for _, what in breaches] == (9 * [said] if told else [])
    files.write_text(results / "config.yaml", json.dumps(asked | {"train": asked["train"] | {"epochs": 30}}))
    said = "it was made with other settings: train.epochs 1, now 30"
    assert (str(run(results)), said) in fairness.check(results).breaches


@pytest.fixture
def two(results, benchmark, tmp_path) -> tuple[Path, Path]:
    """Two folders with reports; ddp takes half as long in the second."""
    other = Path(shutil.copytree(results, tmp_path / "other"))
    for repeat in (1, 2, 3):
        clock = files.read_json(run(other, "ddp", repeat) / "record.json")["clock"]
        change(run(other, "ddp", repeat), clock=clock | {"train_seconds": clock["train_seconds"] / 2})
    return results, other


def report(benchmark, folder: Path) -> None:
    config = read([benchmark.path("results/config.yaml")], ["repeats=3"])
    page.write(summary.gather(config, folder), folder / "report", folder / "predict.csv")


def test_two_folders_are_compared_row_by_row(two, benchmark, run_script):
    for folder in two:
        report(benchmark, folder)
    compared = comparison.compare(*two, allowed={"rules"})  # clocks that contradict each other
    ratios = {line.row: line.ratio for line in compared.lines}
    assert ratios["ddp"].value == pytest.approx(0.5)
    assert ratios["ddp"].distinct
    assert not ratios["single"].distinct
    code, said, _ = run_script("compare", *map(str, two), str(two[0]), "--across", "rules", "--page", "compared.html")
    assert code == 0
    assert "not distinguishable" in said
    written = Path("compared.html").read_text(encoding="utf-8")
    assert "1 of 3 rows take a different time in" in written
    assert "one is a copy of the other" in written  # a folder compared with itself
    assert "not what differs between two" in said


def test_a_folder_that_breaks_the_rules_is_not_compared(results, benchmark, run_script, tmp_path):
    """All runs are checked, not only the first: here a later run of a row is of another machine."""
    other = Path(shutil.copytree(results, tmp_path / "other"))
    for folder in (results, other):
        report(benchmark, folder)
    code, said, wrong = run_script("compare", str(results), str(other))
    assert (code, wrong) == (0, "")
    assert "differs" not in said.replace("what differs between two", "")
    disturb(run(other, "single", 3))  # the run is left out, and the interval widens
    write_journal(other)
    code, _, wrong = run_script("compare", str(results), str(other))
    assert (code, wrong) == (0, "")
    change_environment(run(other, "single", 3), "cpu", "Z80")
    write_journal(other)
    code, _, wrong = run_script("compare", str(results), str(other))
    assert code == 2
    assert f"{other} breaks the rules of a fair run (" in wrong
    assert "cpu is Z80" in wrong
    shutil.rmtree(other / "runs")
    code, _, wrong = run_script("compare", str(results), str(other))
    assert code == 2
    assert "has a report only, so that its runs can't be checked. To compare them all the same: --across rules" in wrong


@pytest.mark.parametrize("kind", ["hardware", "precision", "plan", "weights"])
def test_what_is_not_comparable_is_refused_by_name(two, benchmark, run_script, kind):
    for repeat in (1, 2, 3):
        folder = run(two[1], "ddp", repeat)
        if kind == "hardware":
            change_environment(folder, "cpu", "Z80")
        elif kind == "precision":
            change(folder, precision="bf16")
        else:
            change_hash(folder, kind)
    if kind == "plan":  # and its data, or the report would call it stale
        (file,) = (two[1] / "data" / "plan").glob(f"{record(run(two[1]))['asked']['plan']}.json")
        files.write_json(file, files.read_json(file) | {"hash": 64 * "0"})
    elif kind == "weights":
        file = two[1] / "data" / "data.json"
        files.write_json(file, files.read_json(file) | {"weights": 64 * "0"})
    for folder in two:
        report(benchmark, folder)
    code, _, said = run_script("compare", *map(str, two), "--across", "rules")
    assert code == 2
    assert f"{kind} differs (ddp: " in said
    assert f"--across {kind}" in said
    code, said, _ = run_script("compare", *map(str, two), "--across", "rules", "--across", kind)
    assert code == 0
    assert f"{kind}: " in said


def test_runs_of_another_build_of_an_image_are_told(results):
    for folder in results.glob("runs/*/*/*"):
        change_environment(folder, "image", "lockstep/bench:cpu")
        change_environment(folder, "image_digest", "sha256:aaa")
    write_journal(results)
    assert fairness.check(results).breaches == []
    change_environment(run(results), "image_digest", "sha256:bbb")
    write_journal(results)
    ((where, what),) = fairness.check(results).breaches
    assert where == str(run(results))
    assert what.startswith("its build of the image lockstep/bench:cpu is sha256:bbb, but sha256:aaa in ")


def test_packages_that_differ_are_told_and_not_refused(two, benchmark):
    for folder in two:
        report(benchmark, folder)
    file = two[1] / "report" / "summary.json"
    published = json.loads(file.read_text())
    published["environment"]["packages"]["torch"] = "1.0"
    file.write_text(json.dumps(published))
    differing = comparison.compare(*two, allowed={"rules"}).environment
    assert any(what.startswith("packages.torch: ") for what in differing)
