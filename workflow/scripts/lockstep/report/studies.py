"""Studies: sections of the report that compare somebody's published figures with what was measured here.

A study is a folder in workflow/studies, whose name appears nowhere else:

    study.py         answer(config, rows, timed, verdicts, ratio) -> dict: its findings, which summary.json has under
                     the folder's name. timed: the runs whose time counts, by row; ratio(ours, theirs): the ratio of two
                     rows, as in the table. drawings(answered): (name, function) of its pictures, as in
                     report/charts.py. lines(answered): its lines for the terminal.
    section.html.j2, section.md.j2
                     its section of the page and of report.md, in which `study` has `answer`, `lines`, `name`
                     and `rows`, those of its strategies
    words.yaml       its texts, as in workflow/report/words.yaml; the folder's name is the key of its heading
    config.yaml      its rows
    strategies/      strategies that make again what was published, flaws and all (config/registry.py). Their rows are
                     in a division of the study's name: they are not compared with the others, keep a batch of their own
                     in the proof, and have no LoRA, no forecast and no `world_sizes` but their own.
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType

from lockstep.config.configuration import Config
from lockstep.paths import STUDIES
from lockstep.report.words import Text


@dataclass(frozen=True)
class Section:
    """What the templates of a study show."""

    name: str
    answer: dict
    lines: list[Text]
    rows: list[dict]  # of its strategies, from the table


@cache
def found() -> dict[str, ModuleType]:
    """All studies, by their folders' names."""
    modules = {}
    for file in sorted(STUDIES.glob("*/study.py")):
        specification = importlib.util.spec_from_file_location(f"lockstep_study_{file.parent.name}", file)
        modules[file.parent.name] = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(modules[file.parent.name])
    return modules


def answers(
    config: Config,
    rows: list[dict],
    timed: dict[str, list[dict]],
    verdicts: dict[str, dict | None],
    ratio: Callable[[str | None, str | None], dict | None],
) -> dict[str, dict]:
    """The findings of each study, by name."""
    return {name: study.answer(config, rows, timed, verdicts, ratio) for name, study in found().items()}


def sections(summary) -> list[Section]:
    """The sections of all studies, for the page."""
    return [
        Section(name, answer, found()[name].lines(answer), [row for row in summary.rows if row["division"] == name])
        for name, answer in summary.studies.items()
    ]


def drawings(summary) -> Iterator[tuple[str, Callable]]:
    """(name, function) of every picture of all studies; the names begin with the study's."""
    for name, answer in summary.studies.items():
        for drawing, paint in found()[name].drawings(answer):
            yield f"{name}_{drawing}", paint
