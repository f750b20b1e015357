"""The Snakefile and the commands: light to start, safe to quote, documented by --help."""

import json
import os
import re
import subprocess
import sys

import pytest
import yaml

from lockstep import remaking, workflow
from lockstep.config import reading
from lockstep.config.kinds import Kind
from tests.conftest import PROJECT, copy_project

RULES = [PROJECT / "Snakefile", *sorted((PROJECT / "workflow" / "rules").glob("*.smk"))]
SCRIPTS = sorted(file.stem for file in (PROJECT / "workflow" / "scripts").glob("*.py"))


@pytest.mark.parametrize(("argument", "exit_code"), [("--help", 0), ("--no-such-flag", 2)])
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_is_a_command_with_help(run_script, script, argument, exit_code):
    ended, out, err = run_script(script, argument)
    assert ended == exit_code
    # It is called by the name that set-up gives it.
    name = "lockstep" if script == "command" else f"{script}.py"
    assert (out or err).startswith(f"usage: {name}")


def test_reading_the_snakefile_imports_nothing_heavy():
    """Snakemake reads it at every start, and once more for every job."""
    program = """
import sys
sys.path.insert(0, "workflow/scripts")
import yaml

from lockstep import remaking, workflow
workflow.configuration({}, [])
print(*{"torch", "transformers", "datasets", "sklearn", "pandas", "numpy", "matplotlib"} & set(sys.modules))
"""
    finished = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == ""


def unquoted(text: str) -> list[str]:
    """What a Snakefile's shell commands have filled in as it is."""
    commands = re.findall(r"shell:\n(.*?)(?:\n\n|\Z)", text, re.DOTALL)
    assert len(commands) == text.count("shell:")
    fields = [field for command in commands for field in re.findall(r"\{([^}]*)\}", command)]
    return [field for field in fields if not field.endswith(":q")]


@pytest.mark.parametrize("file", RULES, ids=lambda file: file.name)
def test_what_goes_into_a_shell_is_quoted(file):
    assert unquoted(file.read_text(encoding="utf-8")) == []


def test_what_is_not_quoted_is_noticed():
    rule = 'rule plan:\n    shell:\n        command("plan") + " --plan {wildcards.plan} > {log:q} 2>&1"\n'
    assert unquoted(rule) == ["wildcards.plan"]


def without_log_or_message(text: str) -> list[str]:
    """The rules of a Snakefile with a shell command that lack a log or a message."""
    rules = re.split(r"^ *(?=(?:rule|checkpoint)\b.*:$)", text, flags=re.MULTILINE)
    return [
        rule.splitlines()[0]
        for rule in rules
        if "shell:" in rule and not ("log:\n" in rule and "message:\n" in rule and rule.count("shell:") == 1)
    ]


def test_every_rule_has_a_log_and_a_message():
    texts = [file.read_text(encoding="utf-8") for file in RULES[1:]]
    assert sum(text.count("shell:") for text in texts) >= 10
    assert [rule for text in texts for rule in without_log_or_message(text)] == []


def test_a_rule_without_a_log_is_noticed_beside_one_with_two():
    parts = "    log:\n        'a.log'\n", "    message:\n        'a'\n", "    shell:\n        'a'\n"
    text = "rule a:\n" + "".join(parts) + parts[0] + "\n\nrule b:\n" + "".join(parts[1:])
    assert without_log_or_message(text) == ["rule b:"]


def test_snakemake_measures_no_rule_that_starts_training():
    """Its `benchmark:` reads the memory maps of all processes twice a second, which takes time from what is timed."""
    for file in RULES:
        timed = file.name in ("train.smk", "profile.smk", "parity.smk")
        assert not (timed and "benchmark:\n" in file.read_text(encoding="utf-8"))


THREADS = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
from snakemake.api import SnakemakeApi
from snakemake.settings.types import ConfigSettings, ResourceSettings

with SnakemakeApi() as api:
    asked = ConfigSettings(config={"hardware": {"device": "cpu", "processes": 1} | json.loads(sys.argv[1])})
    made = api.workflow(ResourceSettings(cores=5), config_settings=asked, snakefile=Path("Snakefile"))._workflow
    here = SimpleNamespace(local_exec=sys.argv[2] == "here")
    made._executor_plugin = SimpleNamespace(common_settings=here)
    rules = {rule.name: rule for rule in made.rules}
    names = ("train_single_1", "profile_single", "prove_single")
    print(json.dumps([rules[name].expand_resources({}, [], 1)._cores for name in names]))
"""


@pytest.mark.parametrize(
    ("hardware", "where", "threads"),
    [
        ({}, "here", [5, 5, 2]),
        ({"node_cores": 1}, "here", [5, 5, 5]),  # or two timed rows would start side by side
        ({"node_cores": 3}, "elsewhere", [3, 3, 3]),
    ],
)
def test_a_timed_row_takes_all_cores_for_which_jobs_are_started(tmp_path, hardware, where, threads):
    place = copy_project(tmp_path)
    finished = place.run("python", "-c", THREADS, json.dumps(hardware), where)
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout.splitlines()[-1]) == threads


def test_code_files_follow_imports(monkeypatch):
    monkeypatch.chdir(PROJECT)
    library, strategies = "workflow/scripts/lockstep", "workflow/scripts/lockstep/strategies"
    files = remaking.code_files("launch", "ddp_amp")
    assert {f"{strategies}/{name}.py" for name in ("ddp_amp", "ddp_spawn", "ddp", "single")} <= set(files)
    assert f"{strategies}/dataparallel.py" not in files
    assert {f"{library}/rank/main.py", f"{library}/model/models.py", "workflow/scripts/train.py"} <= set(files)
    assert f"{library}/report/page.py" not in files
    assert f"{library}/report/page.py" in remaking.code_files("report")
    for script, strategy in (("launch", "ddp_amp"), ("prepare", None)):  # which any edit of the report would repeat
        of_report = [file for file in remaking.code_files(script, strategy) if file.startswith(f"{library}/report/")]
        assert of_report == []


def test_only_what_decides_a_result_makes_a_row_train_again(monkeypatch):
    monkeypatch.chdir(PROJECT)
    library = "workflow/scripts/lockstep"

    def files(strategy: str, kind: Kind = Kind.TIMED) -> set[str]:
        found = remaking.training_files(strategy, "text-classification", kind)
        return {file.removeprefix(f"{library}/") for file in found}

    ddp, deepspeed = files("ddp"), files("deepspeed")
    proven, profiled = files("ddp", Kind.TRIAL), files("ddp", Kind.PROFILE)
    decisive = {"rank/replay.py", "rank/clock.py", "model/optimizer.py", "config/fixed.py", "data/plan.py"}
    decisive |= {"strategies/ddp.py", "strategies/single.py", "tasks/text_classification.py", "run/ledger.py"}
    decisive |= {"config/launchers.py", "run/node.py", "data/prepare.py", "workflow/scripts/train.py"}
    decisive |= {"rank/energy.py", "rank/memory.py", "rank/warming.py", "rank/resumption.py", "run/summing.py"}
    decisive |= {"data/readers.py", "data/tables.py", "model/metrics.py", "config/registry.py", "files.py", "nvml.py"}
    decisive |= {"config/qualities.py"}  # which weights are the best, and are kept
    # What is done between steps and after them, and how its numbers become a record.
    decisive |= {"rank/session.py", "rank/snapshots.py", "run/progress.py", "run/facts.py"}
    assert decisive <= ddp
    assert {"config/deepspeed_file.py", "strategies/_deepspeed.py"} <= deepspeed
    assert not ddp & {"config/deepspeed_file.py", "strategies/deepspeed.py", "tasks/image_segmentation.py"}
    telling = {"run/trackers.py", "run/watcher.py", "rank/drawing.py", "run/coordination.py", "report/page.py"}
    telling |= {"cli.py", "config/row.py", "view/live.py", "errors.py", "paths.py", "data/hub.py", "__init__.py"}
    telling |= {"rank/losses.py", "rank/main.py"}
    assert not (ddp | proven | profiled) & telling
    assert proven - ddp == {"config/configuration.py", "proof/conversion.py", "proof/parity.py"}
    assert profiled - ddp == {"rank/profiling.py"}
    named = (*remaking.TELLING, *remaking.AROUND, *remaking.OF_A_KIND[Kind.TRIAL], *remaking.OF_A_KIND[Kind.PROFILE])
    assert [name for name in named if not (PROJECT / library / name).is_file()] == []


def test_what_makes_a_row_train_again_stays_small(monkeypatch):
    """The list grows by itself with every import. A file that decides no result belongs into remaking.TELLING."""
    monkeypatch.chdir(PROJECT)
    files = remaking.training_files("ddp", "text-classification")
    lines = sum(len((PROJECT / file).read_text(encoding="utf-8").splitlines()) for file in files)
    assert 5_000 < lines < 10_500, "does all that has come in decide a result?"


LOADED = """
import json, pathlib, sys
from lockstep.config import registry
from lockstep.rank import main, profiling
from lockstep.data import plan, prepare
registry.load(sys.argv[1])
registry.load_task("text-classification")
files = [module.__file__ for name, module in sys.modules.items() if name.startswith("lockstep")]
print(json.dumps([str(pathlib.Path(file).relative_to(pathlib.Path.cwd())) for file in files]))
"""


@pytest.mark.parametrize("strategy", ["published_trainer", "deepspeed"])
def test_what_a_rank_has_loaded_makes_it_train_again_unless_it_only_tells(monkeypatch, strategy):
    """Whatever way it was imported in: the list is found in source code, and this is what Python has really read."""
    monkeypatch.chdir(PROJECT)
    finished = subprocess.run(
        [sys.executable, "-c", LOADED, strategy],
        env=os.environ | {"PYTHONPATH": "workflow/scripts"},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {file for file in json.loads(finished.stdout.splitlines()[-1]) if not file.endswith("/__init__.py")}
    decides = set(remaking.training_files(strategy, "text-classification"))
    assert {f"workflow/scripts/lockstep/{name}" for name in ("rank/clock.py", "data/prepare.py")} <= loaded & decides
    assert loaded - decides <= {f"workflow/scripts/lockstep/{name}" for name in remaking.TELLING}


def test_files_are_read_over_the_default_configuration_as_in_snakemake(run_script, tmp_path):
    (tmp_path / "mine.yaml").write_text("rows: {fsdp: null, mine: {strategy: ddp}}", encoding="utf-8")
    _, _, said = run_script("launch", "--row", "nothing", "--config", "mine.yaml")
    there = "single, all_threads, dataparallel, ddp, ddp_spawn, ddp_amp, horovod, deepspeed, accelerate, trainer,"
    there += " fabric, mine."
    assert said == f"error: --row nothing: no such row. The configuration has: {there}\n"


def test_the_configuration_that_is_kept_gives_the_same_rows_over_the_default_one(run_script, tmp_path):
    """Whatever was dropped, and whatever the default one says by now."""
    workflow.write_manifest(reading.parse({"rows": {"mine": {"strategy": "ddp"}}}), ["mine"], ["snakemake"], False)
    kept, default = tmp_path / "results" / "config.yaml", tmp_path / "config" / "config.yaml"
    assert list(reading.read([default, kept]).rows) == ["mine"]
    asked = yaml.safe_load(default.read_text(encoding="utf-8"))
    asked["rows"]["later"] = {"strategy": "ddp"}
    default.write_text(yaml.safe_dump(asked), encoding="utf-8")
    _, _, said = run_script("launch", "--row", "nothing", "--config", "results/config.yaml")
    assert said == "error: --row nothing: no such row. The configuration has: mine.\n"


def test_a_full_disk_is_told_after_a_failure(tmp_path, monkeypatch, capsys):
    """A job that could not even write its log has said nothing."""
    (tmp_path / "results").mkdir()
    monkeypatch.chdir(tmp_path)
    checked = reading.parse({"rows": {"mine": {"strategy": "ddp"}}})
    workflow.report_what_there_is(checked)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(workflow, "LITTLE", 2**62)  # as if no more than that were left
    workflow.report_what_there_is(checked)
    assert capsys.readouterr().err == f"{tmp_path / 'results'}: the disk is full. Make room, and start again.\n"
