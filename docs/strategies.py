"""Write docs/strategies.md from the code: what each strategy is, how it is started, and how it differs from single.

make docs
"""

import ast
import re
import tempfile
from pathlib import Path

from lockstep import paths
from lockstep.config import reading, registry, schema
from lockstep.config.differences import difference, inherited, without_folders
from lockstep.run.addresses import Rendezvous

PAGE = Path(__file__).with_suffix(".md")
INTRODUCTION = """# The strategies

<!-- Written by `make docs` from the strategies' files. A test fails while it is not what they say. -->

Each strategy is one file in [`workflow/scripts/lockstep/strategies`](../workflow/scripts/lockstep/strategies), and
those of a study are in its folder in [`workflow/studies`](../workflow/studies). All of them train the same plan, and
this page shows everything in which they differ. The diffs show the methods that a file changes: lines with `-` are
those of `single`, lines with `+` those of the strategy. `single.py` says what each method is for.

[adding-a-strategy.md](adding-a-strategy.md) tells how to add one. Besides the options below, a row may set the keys in
[config/README.md](../config/README.md).
"""
# A run of two processes on a CPU, as a reader would see it. Ports and paths differ from run to run.
ROW = {"hardware": {"device": "cpu", "processes": 2, "threads": 1, "oversubscribe": True}}


def page() -> str:
    names = sorted(registry.names(), key=lambda name: (registry.study(name), name != "single", name))
    return "\n".join([INTRODUCTION, *map(section, names)])


def section(name: str) -> str:
    module = ast.parse(registry.path(name).read_text(encoding="utf-8"))
    parts = [f"## {name}\n", ast.get_docstring(module).removeprefix(f"{name}: ") + "\n"]
    parts[1] = re.sub(r"^(Advantages|Limits|On a CPU):", r"- **\1:**", parts[1], flags=re.MULTILINE)
    literals = registry.literals(name)
    if needs := registry.needs(name):
        needed = (
            f"{need.package} {need.version} (`{need.command}`{''.join(f'; for `{key}`' for key in need.only)})"
            for need in needs
        )
        parts.append(f"Needs {', '.join(needed)}.\n")
    parts.append(f"With two processes on a CPU, it is started by\n\n    {command(name)}\n")
    parts += [options(literals["OPTIONS"]), refusals(literals)]
    if name != "single":
        parts += [f"```diff\n{difference(name)}```\n", inherited(name)]
    return "\n".join(part for part in parts if part)


def command(name: str) -> str:
    row = reading.parse(ROW | {"rows": {name: {"strategy": name}}}).rows[name]
    with tempfile.TemporaryDirectory() as folder:  # some launchers are given a file in it
        words = row.command(Path(folder), Rendezvous("PORT"), script=Path("workflow/scripts/train.py"))
    text = " ".join(words).replace(folder, str(paths.RESULTS / row.folder(1)))
    return without_folders(text)


def options(known: dict) -> str:
    if not known:
        return ""
    lines = ["| option | values | default | meaning |", "|---|---|---|---|"]
    for name, option in known.items():
        kinds = option.get("type", ())
        values = kinds if isinstance(kinds, str) else " or ".join(kinds)
        if "enum" in option:
            values = ", ".join(f"`{value}`" for value in option["enum"])
        default = "null" if option.get("default") is None else str(option["default"]).lower()
        default = f"`{default}`" if "default" in option else "as in `train`"
        lines.append(f"| `{name}` | {values} | {default} | {option['description']} |")
    return "\n".join(lines) + "\n"


def refusals(literals: dict) -> str:
    sections = schema.of_configuration()["properties"]
    settable = {*literals["OPTIONS"], *sections["train"]["properties"], *sections["hardware"]["properties"]}
    lines = [
        f"- {kind}: {', '.join(f'`{_pair(key, allowed)}`' for key, allowed in values.items())} ({reason})"
        for kind, known in (("refused", literals["REFUSED"]), ("not exact", literals["LOSSY"]))
        for values, reason in known
        if settable.issuperset(values)
    ]
    return "\n".join(lines) + "\n" if lines else ""


def _pair(key: str, allowed: list | dict) -> str:
    """A setting that a row may not have together with another: the first of a list, or what a JSON schema says."""
    if isinstance(allowed, list):
        return f"{key}: {allowed[0]}".lower()
    return f"{key}: {allowed['minimum']} or more" if "minimum" in allowed else key


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE.relative_to(Path.cwd())} is written")
