"""The order of Lockstep's rooms, which is the order of imports: one way, without exception."""

import ast
import re
from pathlib import Path

import pytest

from lockstep.paths import PROJECT, SCRIPTS, STUDIES

PACKAGE = SCRIPTS / "lockstep"
# Each may import from those above it. Folders are rooms; inside one, any file from any other, but not in a circle.
# config/registry.py names no strategy or task: it imports a file of those rooms by its name, when a run asks for it.
ORDER = (
    *("errors", "paths", "files", "caches", "stats", "terminal", "provenance", "nvml"),
    *("config", "data", "model", "tasks", "strategies", "run", "rank", "session"),
    *("columns", "analysis", "proof", "evaluation", "report", "frames", "records", "script", "forecast"),
    *("cli", "trust", "tuning", "network", "inside_snakemake", "remaking", "workflow", "view", "outside"),
)


def module(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts)


def imports(code: str) -> set[str]:
    """The modules and rooms of Lockstep that code imports, wherever in it, as in `config.row`; "" is all of it."""
    imported = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lockstep":
            package = node.module.split(".")[1:]
            for alias in node.names:
                names = [*package, alias.name]
                there = PACKAGE.joinpath(*names)
                if there.is_dir() or there.with_suffix(".py").is_file():
                    imported.add(".".join(names))
                elif package:
                    imported.add(".".join(package))
        elif isinstance(node, ast.ImportFrom) and node.level:
            imported.add("")
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            imported |= {".".join(name[1:]) for name in names if name[0] == "lockstep"}
    return imported


def forbidden(name: str, imported: set[str]) -> list[str]:
    """Of what the module `name` imports, what comes after it, or is not named from the top."""
    return sorted(module for module in imported if not module or rank(module) > rank(name))


def rank(name: str) -> int:
    return ORDER.index(name.split(".")[0])


FILES = sorted(file for file in PACKAGE.rglob("*.py") if file.name != "__init__.py")


def test_where_contributing_sends_a_newcomer_there_is_a_file():
    text = (PROJECT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:workflow|config|docs|claims|tests|\.ci)/[\w./-]+)`", text)
    assert len(named) > 40
    assert not [path for path in named if not (PROJECT / path).exists()]


def test_every_file_is_in_a_room():
    assert {module(file).split(".")[0] for file in FILES} == set(ORDER)
    assert all(len(module(file).split(".")) <= 2 for file in FILES), "one level of folders"


@pytest.mark.parametrize("file", FILES, ids=module)
def test_imports_go_one_way(file):
    code = file.read_text(encoding="utf-8")
    after = forbidden(module(file), imports(code))
    assert not after, f"{module(file)} imports {', '.join(after)}, which come after it"
    by_name = 'import_module(f"lockstep' in code or 'import_module("lockstep' in code
    assert by_name == (module(file) == "config.registry"), "the registry alone imports by a name that it has read"


@pytest.mark.parametrize("file", sorted(STUDIES.rglob("*.py")), ids=lambda file: str(file.relative_to(STUDIES)))
def test_a_study_imports_what_its_room_may(file):
    room = "strategies" if file.parent.name == "strategies" else "report"
    assert not forbidden(f"{room}.{file.stem}", imports(file.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "line",
    [
        "from lockstep.report import page",
        "from lockstep.report.page import write",
        "from lockstep import report",
        "import lockstep.report.page",
        "import lockstep",
        "from ..report import page",
        "from . import sources",
    ],
)
def test_an_import_upward_is_seen_however_it_is_written(line):
    assert forbidden("data.plan", imports(f"def later():\n    {line}\n"))


@pytest.mark.parametrize("room", [name for name in ORDER if (PACKAGE / name).is_dir()])
def test_a_room_says_in_a_sentence_what_is_in_it_and_has_no_circles(room):
    begin = ast.parse((PACKAGE / room / "__init__.py").read_text(encoding="utf-8"))
    assert ast.get_docstring(begin)
    of_studies = room == "strategies"  # which finds those of studies in their folders
    assert len(begin.body) == 1 or of_studies, "no imports there"
    files = [file for file in FILES if module(file).startswith(f"{room}.")]
    inside = {module(file): imports(file.read_text(encoding="utf-8")) for file in files}
    while free := {name for name, needed in inside.items() if not needed & inside.keys()}:
        inside = {name: needed for name, needed in inside.items() if name not in free}
    assert not inside, f"these import each other in a circle: {', '.join(sorted(inside))}"
