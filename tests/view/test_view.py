"""The views: when each is taken, what it shows, and that the terminal is given back."""

import fcntl
import io
import json
import logging
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from snakemake_interface_logger_plugins.common import LogEvent
from snakemake_interface_logger_plugins.registry import LoggerPluginRegistry

from lockstep import paths
from lockstep.config import reading
from lockstep.paths import PROJECT
from lockstep.run.progress import Progress
from lockstep.view import choice, jobs, live, plain
from tests import made
from tests.conftest import copy_project

DEFAULT = (
    "all_threads",
    "dataparallel",
    "ddp",
    "ddp_spawn",
    "ddp_amp",
    "horovod",
    "deepspeed",
    "accelerate",
    "trainer",
)
DEFAULT += ("fabric", "fsdp")


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(os, "isatty", lambda number: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv(choice.ASKED, raising=False)
    monkeypatch.setenv(choice.VIEW, "")  # so that it is put back


def test_it_is_taken_in_a_terminal(terminal):
    assert choice.choose(["--cores", "all", "ddp", "--config", "repeats=3"]) == "live"
    assert LoggerPluginRegistry().is_installed(choice.NAME)


@pytest.mark.parametrize(
    "words", [["-n"], ["-nq"], ["--dry-run"], ["--quiet", "all"], ["--logger", "x"], ["--verbose"]]
)
def test_who_asks_for_snakemakes_own_words_gets_them(terminal, words):
    assert not choice.choose(["--cores", "all", *words])


def test_a_view_that_does_not_exist_is_refused(terminal, monkeypatch, capsys):
    monkeypatch.setenv(choice.ASKED, "nonsense")
    with pytest.raises(SystemExit):
        choice.choose(["--cores", "all"])
    assert "LOCKSTEP_VIEW=nonsense: there is no such view" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [(choice.ASKED, "snakemake", ""), (choice.ASKED, "plain", "plain"), ("TERM", "dumb", "plain")],
)
def test_a_variable_or_a_plain_terminal_turns_it_off(terminal, monkeypatch, name, value, taken):
    monkeypatch.setenv(name, value)
    assert choice.choose(["--cores", "all"]) == taken
    assert (choice.VIEW in os.environ) == bool(taken), "jobs need not say what the view shows"


def test_a_log_or_a_pipe_has_plain_lines(terminal, monkeypatch):
    monkeypatch.setattr(os, "isatty", lambda number: False)
    assert choice.choose(["--cores", "all"]) == "plain"


ASKED = {"repeats": 3, "profile": {"steps": 0}, "hardware": {"device": "cpu"}}
ASKED |= {"rows": {name: {"strategy": name} for name in ("single", "ddp")}}


@pytest.fixture
def handler(tmp_path, monkeypatch):
    """Yields a handler in an empty folder; its configuration has the rows single and ddp, three repetitions each."""
    monkeypatch.chdir(tmp_path)
    made = live.LogHandler(SimpleNamespace(dryrun=False), None)
    made.console = Console(file=io.StringIO(), width=80, height=24)
    made.config = reading.parse(dict(ASKED))
    yield made
    made.close()


@pytest.fixture
def lines(handler):
    """The plain view of the same rows."""
    made = plain.LogHandler(SimpleNamespace(dryrun=False), None)
    made.config = handler.config
    return made


def left(handler, repeat: int, row: str, status: str = "ok", **values) -> None:
    """A record of a run by the handler's settings, as its supervisor leaves it, and the data that it is of."""
    config = handler.config
    data = {"hash": 64 * "d", "weights": 64 * "f", "asked": config.data_settings}
    paths.data_folder(config.results).mkdir(parents=True, exist_ok=True)
    paths.data_file(config.results).write_text(json.dumps(data), encoding="utf-8")
    asked = config.rows[row].settings().of_row() | {"dropout": config.model.dropout}
    about = {
        "row": row,
        "repeat": repeat,
        "asked": asked,
        "status": status,
        "reason": "" if status == "ok" else "ended",
    }
    name = paths.RECORD if status == "ok" else paths.FAILED
    folder = config.results / config.rows[row].folder(repeat)
    folder.mkdir(parents=True)
    (folder / name).write_text(json.dumps(made.raw(**about | values)), encoding="utf-8")


def test_the_fastest_row_is_first_and_what_went_wrong_is_marked(handler):
    for repeat, seconds in enumerate((4.0, 4.2, 4.1), 1):
        left(handler, repeat, "single", clock={"train_seconds": seconds})
    left(handler, 1, "ddp", clock={"train_seconds": 2.5})
    left(handler, 2, "ddp", clock={"train_seconds": 9.0}, watch={"disturbed": ["something else ran"]})
    left(handler, 3, "ddp", status="failed")
    rows = handler.rows_now()
    assert [row["row"] for row in rows] == ["ddp", "single"]
    assert (rows[0]["seconds"], rows[0]["runs"], rows[0]["note"]) == (2.5, "2 of 3", "1 disturbed, 1 failed")
    assert (rows[1]["seconds"], rows[1]["within"], rows[1]["runs"]) == (4.1, pytest.approx(0.1), "3 of 3")
    handler.table = rows
    handler.console.print(handler.drawn_table(10))
    first, second = handler.console.file.getvalue().splitlines()[1:]
    assert " 2.50 " in first, "one run has no spread"
    assert " 4.10 ± 0.10 " in second


def test_what_is_to_be_trained_again_is_not_shown_as_if_it_were_new(handler):
    left(handler, 1, "single", clock={"train_seconds": 4.0})
    handler.left.update({"train_single_1": 1, "train_single_2": 1})
    (row,) = handler.rows_now()
    assert (row["row"], row["seconds"], row["runs"]) == ("single", None, "0 of 2")


def trained_as_asked(handler, row: str) -> None:
    """A run and a proof of a row by the handler's settings, and the data that they are of."""
    config = handler.config
    left(handler, 1, row, clock={"train_seconds": 4.0})
    trial = config.trial(config.rows[row])
    proof = config.results / trial.folder(1)
    proof.mkdir(parents=True)
    (proof / paths.SETTINGS).write_text(json.dumps(trial.settings().of_row()), encoding="utf-8")
    (proof / paths.VERDICT).write_text(json.dumps({"proof": "equal"}), encoding="utf-8")


@pytest.mark.parametrize(
    ("changed", "shown"),
    [
        ({}, (4.0, "1 of 1", "equal")),
        ({"train": {"log_every": 5}}, (4.0, "1 of 1", "equal")),
        ({"train": {"epochs": 9}}, None),
        ({"data": {"limit": 300}}, None),
        ({"model": {"layers": 1}}, None),
    ],
)
def test_what_was_trained_by_other_settings_is_not_shown(handler, changed, shown):
    """As after `lockstep row ddp` with another configuration, which leaves the other rows' results where they are."""
    trained_as_asked(handler, "single")
    handler.config = reading.parse(dict(ASKED) | changed)
    rows = [(row["seconds"], row["runs"], row["proof"]) for row in handler.rows_now()]
    assert rows == ([shown] if shown else [])
    assert handler.verdict("single") == ("equal" if shown or "train" in changed else "")


def test_the_steps_of_an_earlier_run_are_not_counted(handler):
    config = handler.config
    row = config.rows["ddp"]
    folder = config.results / row.folder(1)
    folder.mkdir(parents=True)
    Progress(folder, ranks=2).table[:, 2] = 27
    os.utime(folder / paths.PROGRESS, (1, 1))
    plan = paths.plan_summary_file(config.results, row.plan_name)
    plan.parent.mkdir(parents=True)
    plan.write_text('{"steps": 3}', encoding="utf-8")
    handler.emit(record(LogEvent.JOB_INFO, jobid=1, rule_name="train_ddp_1", rule_msg="", log=[]))
    (job,) = handler.running()
    assert handler.steps(job) == (0, 0), "27 of 3"
    Progress(folder, ranks=2).table[:, 2] = 2
    assert handler.steps(job) == (2, 3)


def record(event: LogEvent | None, **extra) -> logging.LogRecord:
    made = logging.makeLogRecord({"levelno": logging.INFO, "msg": "", **extra})
    made.event = event
    return made


def test_the_time_left_follows_from_jobs_of_the_same_kind(handler, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(jobs.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(handler, "_start", lambda: None)
    stats = {"prove_single": 1, "prove_ddp": 1, "train_ddp_1": 1, "train_ddp_2": 1, "evaluate": 2, "total": 6}
    handler.emit(record(LogEvent.RUN_INFO, stats=stats))
    assert handler.seconds_left() is None
    assert handler.how_far() == "0 of 6 jobs"
    rules = {1: "prove_single", 2: "prove_ddp", 3: "train_ddp_1"}
    for number in (1, 2):  # beside each other, in 10 s
        handler.emit(record(LogEvent.JOB_INFO, jobid=number, rule_name=rules[number], rule_msg="", log=[]))
    now[0] += 10
    for number in (1, 2):
        handler.emit(record(LogEvent.JOB_FINISHED, job_id=number))
    handler.emit(record(LogEvent.PROGRESS, done=2, total=6))
    assert handler.seconds_left() is None, "trainings are most of it"
    handler.emit(record(LogEvent.JOB_INFO, jobid=3, rule_name=rules[3], rule_msg="", log=[]))
    now[0] += 5
    monkeypatch.setattr(handler, "steps", lambda job: (10, 40))
    assert handler.seconds_left() == pytest.approx(15 + 20 + 2 * 5)  # a quarter of it took 5 s
    now[0] += 15
    handler.emit(record(LogEvent.JOB_FINISHED, job_id=3))
    handler.emit(record(LogEvent.PROGRESS, done=3, total=6))
    assert handler.seconds_left() == 20 + 2 * 5  # the second repetition; two tests, which nothing is known of yet


def test_the_time_left_is_known_from_the_last_benchmark_here(handler, lines, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(jobs.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(handler, "_start", lambda: None)
    stats = {"train_ddp_1": 1, "evaluate": 1, "total": 2}
    handler.emit(record(LogEvent.RUN_INFO, stats=stats))
    for number, rule, seconds in ((1, "train_ddp_1", 20), (2, "evaluate", 4)):
        handler.emit(record(LogEvent.JOB_INFO, jobid=number, rule_name=rule, rule_msg="", log=[]))
        now[0] += seconds
        handler.emit(record(LogEvent.JOB_FINISHED, job_id=number))
    again = {"train_ddp_1": 1, "train_ddp_2": 1, "evaluate": 2, "total": 4}
    lines.emit(record(LogEvent.RUN_INFO, stats=again))
    assert lines.seconds_left() == 2 * 20 + 2 * 4
    assert "about 48 s left" in lines.how_far()
    # What was known is of other work, and nothing is said of a damaged file.
    lines.config = reading.parse(ASKED | {"model": {"layers": 7}})
    lines.emit(record(LogEvent.RUN_INFO, stats=again))
    assert lines.seconds_left() is None
    lines.config = handler.config
    paths.costs_file(paths.RESULTS).write_text("[", encoding="utf-8")
    lines.emit(record(LogEvent.RUN_INFO, stats=again))
    assert lines.seconds_left() is None


def test_a_pipe_gets_a_line_for_each_finished_run(lines, capsys):
    stats = {"prove_ddp": 1, "train_ddp_1": 1, "train_ddp_2": 1, "evaluate": 1, "total": 4}
    lines.emit(record(None, msg="Building DAG of jobs..."))
    lines.emit(record(LogEvent.RUN_INFO, stats=stats))
    for number, rule, message in ((1, "train_ddp_1", "ddp, repetition 1: train on 2 x cpu"), (2, "evaluate", "test")):
        lines.emit(record(LogEvent.JOB_INFO, jobid=number, rule_name=rule, rule_msg=message, log=[]))
    left(lines, 1, "ddp", clock={"train_seconds": 2.5}, watch={"disturbed": ["something else ran"]})
    lines.emit(record(LogEvent.JOB_FINISHED, job_id=1))
    lines.emit(record(LogEvent.JOB_FINISHED, job_id=2))
    first, *others = capsys.readouterr().err.splitlines()
    assert first.startswith("4 jobs; ")
    assert others == [
        "ddp, repetition 1: train on 2 x cpu: 2.50 s; disturbed: something else ran; 1 of 4 jobs, about 0 s left"
    ]


def test_after_ctrl_c_nothing_is_told_of_what_is_ended(lines, capsys):
    lines.emit(record(LogEvent.RUN_INFO, stats={"train_ddp_1": 1, "total": 1}))
    lines.emit(record(LogEvent.JOB_INFO, jobid=1, rule_name="train_ddp_1", rule_msg="ddp: train", log=["run.log"]))
    lines.emit(record(None, msg="Terminating processes on user request, this might take some time."))
    lines.emit(record(LogEvent.JOB_ERROR, jobid=1))
    lines.emit(record(None, msg="At least one job did not complete successfully.", levelno=logging.ERROR))
    _, *said = capsys.readouterr().err.splitlines()
    assert said == ["interrupted: running jobs are ended, then follows the report on the results so far"]


def test_a_job_that_prints_has_the_terminal_also_beside_others(handler, monkeypatch):
    started = []
    monkeypatch.setattr(handler, "_start", lambda: started.append(list(handler.jobs)))
    for number, rule in ((1, "predict"), (2, "prove_ddp")):
        handler.emit(record(LogEvent.JOB_INFO, jobid=number, rule_name=rule, rule_msg="", log=[]))
    assert started == []
    handler.emit(record(LogEvent.JOB_FINISHED, job_id=1))
    assert started == [[2]]


def test_a_pipe_is_told_that_there_is_nothing_to_do(lines, capsys):
    lines.emit(record(None, msg="Nothing to be done (all requested files are present and up to date)."))
    assert capsys.readouterr().err.startswith("Nothing to be done")


def test_a_job_that_begins_is_drawn(handler):
    handler.console = Console(file=io.StringIO(), width=80, height=24, force_terminal=True)
    handler.emit(record(LogEvent.JOB_INFO, jobid=1, rule_name="prepare", rule_msg="prepare: the texts", log=[]))
    handler.live.refresh()
    assert "prepare: the texts" in handler.console.file.getvalue()


def test_a_terminal_that_became_narrower_is_erased_whole(handler):
    """What was drawn at 80 columns is folded at 30, and takes more lines than were written."""
    handler.console = Console(file=io.StringIO(), width=80, height=24, force_terminal=True)
    handler.emit(record(LogEvent.JOB_INFO, jobid=1, rule_name="prepare", rule_msg="prepare: the texts", log=[]))
    handler.live.refresh()
    wide, before = handler.drawn[1], len(handler.console.file.getvalue())
    handler.live.refresh()
    usual = handler.console.file.getvalue()[before:]
    handler.console.width = 30
    handler.live.refresh()
    narrower = handler.console.file.getvalue()[before + len(usual) :]
    assert usual.count("\x1b[1A") == len(wide) - 1
    assert narrower.count("\x1b[1A") == sum(max(1, math.ceil(width / 30)) for width in wide) - 1 > len(wide) - 1


def test_a_job_that_failed_shows_the_end_of_its_log_and_its_name(handler, tmp_path, monkeypatch):
    log = tmp_path / "run.log"
    log.write_text("".join(f"line {n}\n" for n in range(100)) + "\x1b[2Jthe cause\n", encoding="utf-8")
    monkeypatch.setattr(handler, "_start", lambda: None)
    handler.emit(record(LogEvent.JOB_INFO, jobid=1, rule_name="train_ddp_1", rule_msg="ddp: train", log=[str(log)]))
    handler.emit(record(LogEvent.JOB_ERROR, jobid=1))
    said = handler.console.file.getvalue()
    assert "failed: ddp: train" in said
    assert "line 99" in said
    assert "line 50" not in said
    assert "[2Jthe cause" in said
    assert "\x1b[2J" not in said, "no control characters of a log reach the terminal"
    assert str(log) in said.replace("\n", "")


@pytest.mark.parametrize(
    ("rule", "local", "told"), [("train_ddp_1", True, 0), ("train_ddp_1", False, 1), ("tune", True, 1)]
)
def test_a_run_that_failed_says_why_once_and_in_its_own_words(handler, tmp_path, monkeypatch, rule, local, told):
    """A run that is timed has said it already, where that is seen."""
    monkeypatch.setattr(handler, "local", local)
    (tmp_path / "run.log").write_text("what torchrun says of it\n", encoding="utf-8")
    (tmp_path / paths.FAILED).write_text(json.dumps({"reason": "rank 1: the cause"}), encoding="utf-8")
    monkeypatch.setattr(handler, "_start", lambda: None)
    job = {"jobid": 1, "rule_name": rule, "rule_msg": "what", "log": [str(tmp_path / "run.log")]}
    handler.emit(record(LogEvent.JOB_INFO, **job))
    handler.emit(record(LogEvent.JOB_ERROR, jobid=1))
    said = handler.console.file.getvalue()
    assert said.startswith("failed: what; 0 of ")
    assert said.count("rank 1: the cause") == told
    assert "torchrun" not in said


def test_a_table_that_does_not_fit_says_how_much_is_left_out(handler):
    handler.table = [
        {"row": f"row{n}", "seconds": 1.0 + n, "within": None, "runs": "1 of 1", "proof": "equal", "note": ""}
        for n in range(40)
    ]
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(handler.drawn_table(10))
    text = console.export_text()
    assert "row9" in text
    assert "row10" not in text
    assert "and 30 more" in text
    assert max(map(len, text.splitlines())) <= 80


SMALL = """
data: {limit: 300}
model: {hidden_size: 32, layers: 1}
train: {epochs: 1, max_steps: 20, eval_every: 0, checkpoint: last}
hardware: {device: cpu, processes: 2, threads: 1, oversubscribe: true}
profile: {steps: 0}
predict: {count: 1}
repeats: 1
retries: 0
rows:
  exploding: {strategy: single, learning_rate: 1.0e+30, clip: 0}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "fails"), [pytest.param(80, True, marks=pytest.mark.ci), (140, False)])
def test_a_person_at_a_terminal_sees_the_table_fill(tmp_path, columns, fails):
    """Trainings, of which one may fail: the view, the failure, then the report's table, in a terminal of its own."""
    place = copy_project(tmp_path / "project")
    rows = "".join(f"  {name}: null\n" for name in DEFAULT)
    text = SMALL if fails else SMALL.replace("  exploding: {strategy: single, learning_rate: 1.0e+30, clip: 0}\n", "")
    place.path("small.yaml").write_text(text + rows, encoding="utf-8")
    code, shown = in_terminal(
        ["snakemake", "--cores", "all", "--configfile", "small.yaml"], place.folder, place.environment(), columns
    )
    assert code == int(fails), shown
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    sentences = " ".join(plain.split())
    assert "same model?" in plain
    assert re.search(r"\d+ of \d+ jobs", plain)
    assert " left" in plain
    assert re.search(r"single +█+ +\d+\.\d\d +1 of 1", plain), "the row that finished"
    if fails:
        assert "failed: exploding, repetition 1" in sentences
        assert sentences.count("the loss is") == 2, "when it fails, and in the report"
        assert "(log: results/runs/exploding" in sentences
        assert "\x1b[31mfailed: exploding" in shown, "in red"
        assert "At least one job did not complete" not in sentences
    assert "Select jobs to execute" not in plain
    assert "Finished jobid" not in plain
    assert "steps in" not in plain, "what a run says when it ends stands in the table"
    assert plain.rstrip().count("report: results/report/report.html") == 1
    (log,) = place.folder.glob(".snakemake/log/*.log")
    assert "Finished jobid" in log.read_text(), "Snakemake's own output is in its log"
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h"), "the cursor is shown again"


@pytest.mark.parametrize("columns", [80, 100])
def test_a_target_that_there_is_not_is_answered_with_the_rows_in_whole_words(columns):
    """And Snakemake's remark on its profile, printed before anybody is asked, is erased again."""
    command = [str(Path(sys.executable).with_name("snakemake")), "ddpp"]
    code, shown = in_terminal(command, PROJECT, dict(os.environ), columns)
    before, _, rest = shown.partition(choice.UP_AND_ERASE * math.ceil(len(choice.READS) / columns))
    assert before.splitlines() == [choice.READS]
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", rest).splitlines()
    said = " ".join(lines)
    assert code == 1, shown
    assert said.startswith("error: ddpp: no such row. The configuration has: single, ")
    assert said.endswith("Did you mean ddp?")
    assert len(lines) > 1
    assert max(map(len, lines)) <= columns


def test_what_is_said_in_a_terminal_is_broken_between_words_and_red_where_it_failed(handler):
    handler.console = Console(file=io.StringIO(), width=40, force_terminal=True, color_system="standard")
    path = "results/runs/exploding/n1/rep1/a/very/long/path/run.log"
    handler.say(f"failed: exploding: the loss is nan in step 3; lower train.learning_rate (log: {path})")
    said = handler.console.file.getvalue()
    assert said.startswith("\x1b[31m")
    words = re.sub(r"\x1b\[[0-9;]*m", "", said).splitlines()
    assert words == [
        "failed: exploding: the loss is nan in",
        "step 3; lower train.learning_rate (log:",
        f"{path})",  # which can be copied
    ]


def test_snakemakes_own_words_on_a_failure_are_left_to_the_job(lines, capsys):
    for words in jobs.OVER:
        lines.emit(record(None, msg=f"WorkflowError:\n{words}.", levelno=logging.ERROR))
    lines.emit(record(None, msg="Complete log(s): x"))
    assert capsys.readouterr().err == ""


def in_terminal(command: list[str], folder: Path, environment: dict, columns: int) -> tuple[int, str]:
    """Run a command in a pseudo-terminal of that many columns and 40 lines: its exit code, and all that it wrote."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES", choice.ASKED)}
    process = subprocess.Popen(
        command, cwd=folder, env=environment | {"TERM": "xterm"}, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    written = bytearray()

    def read() -> None:
        try:
            while data := os.read(ours, 65536):
                written.extend(data)
        except OSError:  # Linux says so when the last process of the terminal has ended
            pass

    reader = threading.Thread(target=read)
    reader.start()
    code = process.wait(timeout=600)
    reader.join(timeout=10)
    os.close(ours)
    return code, written.decode(errors="replace")


@pytest.mark.parametrize("columns", [0, 20])
def test_a_terminal_that_does_not_tell_its_size_is_written_to(columns, tmp_path):
    """As Docker gives one to a container that nobody looks at."""
    program = """if True:
        import sys
        from lockstep.errors import tell
        from lockstep.view import choice
        print(choice.choose([]))
        tell("one row is shown to be faster " * 5, sys.stderr)
    """
    variables = os.environ | {"PYTHONPATH": str(PROJECT / "workflow" / "scripts")}
    code, said = in_terminal([sys.executable, "-c", program], tmp_path, variables, columns)
    assert code == 0, said
    assert "live" in said
    assert ("\x1b[A" in said) == (columns != 0)


def test_what_is_printed_meanwhile_comes_out_above(capfd):
    """A process that this one starts writes to the same stderr."""
    said = []
    streams = live.Stderr(said.append)
    try:
        subprocess.run([sys.executable, "-c", "import sys; print('a warning', file=sys.stderr)"], check=True)
    finally:
        streams.give_back()
    print("afterwards", file=sys.stderr)
    assert said == ["a warning"]
    assert "afterwards" in capfd.readouterr().err
