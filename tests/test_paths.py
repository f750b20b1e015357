"""The layout of a results folder is said in one place: lockstep/paths.py."""

import ast
import re
from pathlib import Path

import pytest

from lockstep import paths
from tests.conftest import PROJECT

# Names that also stand for something of others: the manifest of a sealed folder (lockstep/files.py).
OTHERS_TOO = {"manifest.json"}
SCRIPTS = [file for file in paths.SCRIPTS.rglob("*.py") if file.name != "paths.py"]
RULES = [PROJECT / "Snakefile", *sorted((PROJECT / "workflow" / "rules").glob("*.smk"))]


def literals(text: str) -> list[str]:
    """The string literals of a program, without what explains it: docstrings, and what a command says of itself."""
    tree = ast.parse(text)
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    told |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "help"}
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [node.value for node in texts if id(node) not in told]


def names() -> set[str]:
    """The names of files in the layout, as `record.json`, and the endings of those that are filled in, as `.npz`."""
    said = literals((paths.SCRIPTS / "lockstep" / "paths.py").read_text(encoding="utf-8"))
    return {part for text in said for part in text.split("/") if re.fullmatch(r"[\w-]+(\.\w+)+", part)} - OTHERS_TOO


def spelt(text: str, known: set[str]) -> set[str]:
    """Which of these names a program spells itself, alone or at the end of a path."""
    return {name for name in known for literal in literals(text) if literal.split("/")[-1] == name}


def test_the_layout_has_names():
    assert {
        "record.json",
        "ledger.npz",
        "report.html",
        "config.yaml",
        "weights.safetensors",
        "predictions.csv",
    } < names()


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: str(file.relative_to(paths.SCRIPTS)))
def test_no_script_spells_a_name_of_the_layout(file):
    allowed = {"config.yaml"} if file.name == "reading.py" else set()  # the project's own: config/config.yaml
    assert spelt(file.read_text(encoding="utf-8"), names()) <= allowed


def spelt_by_rules(text: str, known: set[str]) -> list[str]:
    """The lines of a Snakefile that spell one of these names, or a path in results/; comments may."""
    spelling = re.compile("results/|" + "|".join(rf"(?<![\w.-]){re.escape(name)}(?![\w.])" for name in known))
    lines = [line for line in text.splitlines() if "config/config.yaml" not in line]  # the project's own
    return [line for line in lines if spelling.search(re.sub(r"(^|\s)#.*", "", line))]


@pytest.mark.parametrize("file", RULES, ids=lambda file: file.name)
def test_no_rule_spells_a_name_of_the_layout(file):
    assert spelt_by_rules(file.read_text(encoding="utf-8"), names()) == []


def test_a_name_that_is_spelt_a_second_time_is_noticed():
    assert spelt('read(folder / "record.json")', names()) == {"record.json"}
    assert spelt('read("results/data/data.json")', names()) == {"data.json"}
    assert spelt_by_rules('        f"{folder}/record.json",  # of a run', names())
    assert spelt_by_rules("        results/logs/plan.log", names())
    assert not spelt_by_rules("# results/runs/\n    templates=['workflow/report/report.html.j2'],", names())
    assert spelt('"""What becomes of record.json."""\nread(folder / paths.RECORD)', names()) == set()


def test_a_runs_folder_tells_where_it_lies():
    run = Path("elsewhere") / paths.RUNS / paths.run_name("ddp", 2, 1)
    assert run == Path("elsewhere/runs/ddp/n2/rep1")
    assert (paths.row_of(run), paths.results_of(Path.cwd() / run)) == ("ddp", Path.cwd() / "elsewhere")
    assert paths.results_of(Path.cwd() / "elsewhere" / paths.PARITY / paths.run_name("ddp", 2, 1)) is None


def test_files_of_runs_are_those_of_their_kind(tmp_path):
    wanted = [tmp_path / paths.RUNS / paths.run_name("ddp", 2, repeat) / paths.RECORD for repeat in (1, 2)]
    others = [
        tmp_path / paths.PARITY / paths.run_name("ddp", 2, 1) / paths.RECORD,
        tmp_path / paths.RUNS / paths.run_name("single", 1, 1) / paths.RECORD,
        tmp_path / paths.RUNS / paths.run_name("ddp", 2, 1) / paths.FAILED,
    ]
    for file in (*wanted, *others):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert paths.run_files(tmp_path, paths.RECORD, row="ddp") == wanted
    assert paths.run_files(tmp_path, paths.RECORD) == [*wanted, others[1]]
    assert paths.run_files(tmp_path, paths.RECORD, kind=paths.PARITY) == [others[0]]
    assert [paths.first_repetition_of(file.parent) for file in wanted] == 2 * [wanted[0].parent]
