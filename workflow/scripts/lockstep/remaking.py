"""What makes Snakemake run a rule again: the code, data and templates that its result depends on.

It imports nothing slow, because Snakemake reads the Snakefile at every start.
"""

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from lockstep import paths
from lockstep.config import registry
from lockstep.config.configuration import Config
from lockstep.config.kinds import Kind

# Files that do not decide the result of a training: they read the configuration (a rule has the resolved settings as a
# parameter), or name, fetch, watch, report or end something. What they import is looked at only if others import it.
TELLING = (
    *("caches.py", "cli.py", "errors.py", "paths.py", "provenance.py", "data/hub.py"),
    *("config/configuration.py", "config/containers.py", "config/keys.py", "config/nested.py", "config/reading.py"),
    *("config/row.py", "config/schema.py", "config/sections.py", "config/tracking.py", "rank/by_hand.py"),
    *("rank/drawing.py", "rank/environment.py", "rank/losses.py", "rank/main.py", "rank/profiling.py"),
    *("rank/ray_cluster.py", "rank/ray_worker.py", "run/hand.py", "run/journal.py", "run/lifetime.py"),
    *("run/refusals.py", "run/trackers.py", "run/training_log.py", "run/watcher.py"),
)
# Files that decide the result from outside the ranks: how they are started, with which environment, and how their files
# become a record. Below, files that decide the verdict of a trial, or a profile.
AROUND = (
    *("config/launchers.py", "run/facts.py", "run/ledger.py", "run/node.py", "run/record.py", "run/record_files.py"),
    *("run/runs.py", "run/summing.py"),
)
OF_A_KIND = {
    Kind.TRIAL: ("config/configuration.py", "proof/conversion.py", "proof/parity.py"),
    Kind.PROFILE: ("rank/profiling.py",),
}


def data_files(checked: Config) -> list[str]:
    """The local files of data, and of the user's own model, that `prepare` reads; editing one runs it again."""
    files = [checked.model.file] if checked.model.file else []
    if checked.data.embedded:
        embedded = registry.task_literals(checked.task)["EMBEDDED"]
        return [*_of_project(embedded), *files]
    if not checked.data.path:
        return files
    inside = Path(checked.data.path).glob("*") if Path(checked.data.path).is_dir() else []
    return [checked.data.path, *sorted(map(str, inside)), *files]


def templates() -> list[str]:
    """The files that the report is made with; editing one makes it again."""
    own = (file for file in (paths.WORKFLOW / "report").iterdir() if file.is_file())
    of_studies = (file for file in paths.STUDIES.glob("*/*.*") if file.is_file())
    return _of_project([*own, *of_studies, *registry.own_scripts().values()])


def code_files(name: str, strategy: str | None = None, task: str | None = None) -> list[str]:
    """A script, and the files of Lockstep that it, the strategy and the task import, directly or indirectly."""
    roots = [paths.SCRIPTS / f"{name}.py"]
    if strategy:
        roots += [paths.TRAIN, registry.path(strategy)]
    if task:
        roots.append(registry.task_path(task))
    return _files(tuple(roots), (), (), Path.cwd())


def training_files(strategy: str, task: str, kind: Kind = Kind.TIMED) -> list[str]:
    """The files of Lockstep that, beside its settings, decide the result of a run of a kind.

    These are the files that each rank imports, those that make data and plan, and AROUND, without TELLING, and without
    the files of packages, which hold no code (tests/test_rooms.py).
    """
    session = paths.SCRIPTS / "lockstep" / "rank" / "session.py"  # rank/main.py, which only tells, imports it
    roots = (paths.TRAIN, session, registry.path(strategy), registry.task_path(task))
    before = tuple(paths.SCRIPTS / f"{name}.py" for name in ("prepare", "plan"))
    files = _files((*roots, *before), TELLING, (*AROUND, *OF_A_KIND.get(kind, ())), Path.cwd())
    return [file for file in files if Path(file).name != "__init__.py"]


def any_newer(files: list[str], result: Path) -> bool:
    """Whether one of these files was written after `result`, which may be missing."""
    if not result.is_file():
        return False
    made = result.stat().st_mtime
    return any(Path(file).is_file() and Path(file).stat().st_mtime > made for file in files)


@cache  # hundreds of rules share a few dozen such lists
def _files(roots: tuple[Path, ...], left_out: tuple[str, ...], besides: tuple[str, ...], here: Path) -> list[str]:
    """`roots` and their imports, except those `left_out`; and the files `besides`, without their imports."""
    library = paths.SCRIPTS / "lockstep"
    todo, files, closed = list(roots), set(), {library / name for name in left_out}
    while todo:
        file = todo.pop()
        if file not in files | closed:
            files.add(file)
            todo += _imports(file)
    return _of_project(files | {library / name for name in besides})


def _of_project(files: Iterable[Path | str]) -> list[str]:
    """The paths of project files in a rule's input."""
    return sorted(str(paths.of_project(file)) for file in files)


@cache
def _imports(file: Path) -> list[Path]:
    """The files of Lockstep that `file` imports, anywhere in it."""
    modules = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lockstep":
            modules += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [file for module in modules for file in _module_files(module)]


def _module_files(name: str) -> list[Path]:
    """The file of a module, or the `__init__.py` of a package, by its dotted name; empty if neither has this name."""
    place = paths.SCRIPTS.joinpath(*name.split("."))
    folders = registry.folders() if place.parent == paths.STRATEGIES else [place.parent]
    files = [folder / file for folder in folders for file in (f"{place.name}.py", f"{place.name}/__init__.py")]
    return [file for file in files if file.is_file()]
