"""Studies: sections of the report that hold somebody's published figures against what was measured here.

A study is a folder in workflow/studies, and nothing else knows its name:

    study.py         answer(config, rows, timed, verdicts, ratio) -> dict: what it finds, which summary.json has under
                     the folder's name. timed: by row, the runs whose time counts; ratio(ours, theirs): of two rows, as
                     the table has it. drawings(answered): (name, function) of its pictures, as report/charts.py has
                     them. lines(answered): what the terminal says of it.
    section.html.j2, section.md.j2
                     its section of the page and of report.md, in which `study` has `answer`, `lines` and `name`
    words.yaml       its words, as workflow/report/words.yaml; the folder's name is the key of its heading
    config.yaml      the rows that it is about
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType

from lockstep.config.configuration import Config
from lockstep.report.words import STUDIES, Text


@dataclass(frozen=True)
class Section:
    """What a study's templates show."""

    name: str
    answer: dict
    lines: list[Text]


@cache
def found() -> dict[str, ModuleType]:
    """All studies, by the names of their folders."""
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
    """What each study finds."""
    return {name: study.answer(config, rows, timed, verdicts, ratio) for name, study in found().items()}


def sections(summary) -> list[Section]:
    """What the page shows of each study's answer."""
    return [Section(name, answer, found()[name].lines(answer)) for name, answer in summary.studies.items()]


def drawings(summary) -> Iterator[tuple[str, Callable]]:
    """(name, function) of every picture of a study; its name begins with the study's."""
    for name, answer in summary.studies.items():
        for drawing, paint in found()[name].drawings(answer):
            yield f"{name}_{drawing}", paint
