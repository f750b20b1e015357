"""The order of Lockstep's rooms, which is the order of imports: one way, without exception."""

import ast
from pathlib import Path

import pytest

from lockstep.paths import SCRIPTS

PACKAGE = SCRIPTS / "lockstep"
# Each may import from those above it. Folders are rooms; inside one, any file from any other, but not in a circle.
# config/registry.py names no strategy or task: it imports a file of those rooms by its name, when a run asks for it.
ORDER = (
    *("errors", "paths", "files", "stats", "terminal", "provenance", "nvml"),
    *("config", "data", "model", "tasks", "strategies", "run", "rank", "proof", "report"),
    *("cli", "trust", "tuning", "workflow", "view"),
)


def module(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts)


def imports(file: Path) -> set[str]:
    """The modules of Lockstep that a file imports, wherever in it, as in `config.row`."""
    imported = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lockstep":
            package = node.module.split(".")[1:]
            for alias in node.names:
                names = [*package, alias.name]
                is_module = PACKAGE.joinpath(*names).with_suffix(".py").is_file()
                imported.add(".".join(names if is_module else package))
    return imported


FILES = sorted(file for file in PACKAGE.rglob("*.py") if file.name != "__init__.py")


def test_every_file_is_in_a_room():
    assert {module(file).split(".")[0] for file in FILES} == set(ORDER)
    assert all(len(module(file).split(".")) <= 2 for file in FILES), "one level of folders"


@pytest.mark.parametrize("file", FILES, ids=module)
def test_imports_go_one_way(file):
    room = module(file).split(".")[0]
    above = {imported for imported in imports(file) if ORDER.index(imported.split(".")[0]) > ORDER.index(room)}
    assert not above, f"{module(file)} imports {', '.join(sorted(above))}, which come after it"


@pytest.mark.parametrize("room", [name for name in ORDER if (PACKAGE / name).is_dir()])
def test_a_room_says_in_a_sentence_what_is_in_it_and_has_no_circles(room):
    begin = ast.parse((PACKAGE / room / "__init__.py").read_text(encoding="utf-8"))
    assert ast.get_docstring(begin)
    assert len(begin.body) == 1, "no imports there"
    inside = {module(file): imports(file) for file in FILES if module(file).startswith(f"{room}.")}
    while free := {name for name, needed in inside.items() if not needed & inside.keys()}:
        inside = {name: needed for name, needed in inside.items() if name not in free}
    assert not inside, f"these import each other in a circle: {', '.join(sorted(inside))}"
