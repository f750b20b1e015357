"""Files made of the templates in workflow/report; a page is one file that asks for nothing."""

import base64
import hashlib

import jinja2
from markupsafe import Markup

from lockstep import paths
from lockstep.report.words import STUDIES, Text, say

FOLDER = paths.WORKFLOW / "report"


def page(template: str, title: Text, context: dict) -> str:
    """A page with the style and the script that all have; it may run that script, by its hash, and no other."""
    script = (FOLDER / "page.js").read_text(encoding="utf-8")
    shared = {
        "title": title,
        "style": Markup((FOLDER / "page.css").read_text(encoding="utf-8")),
        "script": Markup(script),
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }
    return _environment(escape=True).get_template(template).render(context | shared).lstrip()


def markdown(template: str, context: dict) -> str:
    return _environment(escape=False).get_template(template).render(context).lstrip()


def _environment(escape: bool) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([FOLDER, STUDIES]),
        autoescape=escape,  # the dataset's texts are anybody's
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = markdown_cell
    environment.globals["say"] = say
    return environment


def markdown_cell(value) -> str:
    """A text that can't break out of a Markdown table's cell, nor be read as Markdown or HTML."""
    text = str(value).replace("&", "&amp;").replace("<", "&lt;").replace("\n", " ")
    for mark in "\\|`*_[]#":
        text = text.replace(mark, f"\\{mark}")
    return text
