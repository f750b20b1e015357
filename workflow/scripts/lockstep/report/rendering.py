"""Renders the templates in workflow/report. A page is a single file that loads nothing else."""

import base64
import hashlib

import jinja2
from markupsafe import Markup

from lockstep import paths
from lockstep.proof.verdicts import multiple
from lockstep.report.words import Text, note, say, three

FOLDER = paths.WORKFLOW / "report"


def page(template: str, title: Text, context: dict) -> str:
    """A page with the common style and script. By its hash the page allows this script, and no other."""
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
        loader=jinja2.FileSystemLoader([FOLDER, paths.STUDIES]),
        autoescape=escape,  # the texts of a dataset can't be trusted
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"cell": markdown_cell, "multiple": multiple}
    environment.globals |= {"say": say, "note": note, "three": three}
    return environment


def markdown_cell(value) -> str:
    """A text escaped for a Markdown table, so that it can't leave its cell or be read as Markdown or HTML."""
    text = str(value).replace("&", "&amp;").replace("<", "&lt;").replace("\n", " ")
    for mark in "\\|`*_[]#":
        text = text.replace(mark, f"\\{mark}")
    return text
