"""The verdict on a script as a page: what differs, why, in which line, step by step and parameter by parameter."""

from dataclasses import asdict

from lockstep.report import rendering
from lockstep.report.words import say
from lockstep.script.findings import Verdict
from lockstep.script.pretended import CANNOT_KNOW


def page(verdict: Verdict, command: str, gpus: int) -> str:
    """The page, in one file. command: the proven command; gpus: the number of pretended GPUs, 0 without."""
    rehearsed = CANNOT_KNOW if gpus else ""
    context = {"verdict": asdict(verdict), "command": command, "rehearsed": rehearsed}
    return rendering.page("proof.html.j2", say("script_title"), context)
