"""Writes docs/strategies.md from the code: what each strategy is, how it is started, and how it differs from single.

make docs
"""

import ast
import difflib
import re
import tempfile
from pathlib import Path

from lockstep.config import reading, registry, schema
from lockstep.run import launchers
from lockstep.run.nodes import Meeting

PAGE = Path(__file__).with_suffix(".md")
INTRODUCTION = """# The strategies

<!-- Written by `make docs` from the strategies' files. A test fails while it is not what they say. -->

Each strategy is one file in [`workflow/scripts/lockstep/strategies`](../workflow/scripts/lockstep/strategies). All
train the same plan; they differ only in what stands here. The differences below are of the methods that a file changes:
`-` as `single` does it, `+` as it is done here. What a method is for stands in `single.py`.

How to add one: [adding-a-strategy.md](adding-a-strategy.md). What may stand in a row besides the options below:
[config/README.md](../config/README.md).
"""
# What a reader would see of a run of two processes on a CPU. Ports and paths differ from run to run.
ROW = {"hardware": {"device": "cpu", "processes": 2, "threads": 1, "oversubscribe": True}}


def page() -> str:
    names = sorted(registry.names(), key=lambda name: (name.startswith("published_"), name != "single", name))
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
    parts.append(f"Started, with two processes on a CPU, by\n\n    {command(name)}\n")
    parts += [options(literals["OPTIONS"]), refusals(literals)]
    if name != "single":
        parts += [f"```diff\n{difference(name)}```\n", inherited(name)]
    return "\n".join(part for part in parts if part)


def command(name: str) -> str:
    row = reading.parse(ROW | {"rows": {name: {"strategy": name}}}).rows[name]
    with tempfile.TemporaryDirectory() as folder:  # where some launchers are given a file
        words = launchers.command(row.settings(), Path("workflow/scripts/train.py"), Path(folder), Meeting("PORT"))
    text = " ".join(words).replace(folder, f"results/{row.folder(1)}")
    return re.sub(r"\S*/bin/", "", re.sub(r"\S*/bin/python[\d.]*", "python", text))


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
        f"- {kind}: {', '.join(f'`{key}: {value[0]}`'.lower() for key, value in values.items())} ({reason})"
        for kind, known in (("refused", literals["REFUSED"]), ("not exact", literals["LOSSY"]))
        for values, reason in known
        if settable.issuperset(values)
    ]
    return "\n".join(lines) + "\n" if lines else ""


def difference(name: str) -> str:
    """A diff of single's methods and those in the strategy's file; then what else the file defines."""
    base, own = definitions("single")[0], definitions(name)[0]
    lines = []
    for method, text in own.items():
        changed = difflib.unified_diff(base.get(method, []), text, n=1000, lineterm="")
        lines += [*list(changed)[3:], ""]
    for function in helpers(name):
        lines += [*(f"+{line}" for line in function), ""]
    return "\n".join(lines)


def inherited(name: str) -> str:
    """Which methods it takes over from the strategies that it extends, other than single."""
    lines, has = [], set(definitions(name)[0])
    while (name := definitions(name)[1]) not in (None, "single"):
        taken = [method for method in definitions(name)[0] if method not in has]
        has.update(taken)
        if taken:
            lines.append(f"As in [{name}](#{name}): {', '.join(f'`{method}`' for method in taken)}.\n")
    return "\n".join(lines)


def definitions(name: str) -> tuple[dict[str, list[str]], str | None]:
    """The methods in a strategy's file, as lines by name, and the strategy that its class extends."""
    source = registry.path(name).read_text(encoding="utf-8")
    (strategy,) = [
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "Strategy"
    ]
    base = ast.unparse(strategy.bases[0]).removesuffix(".Strategy") if strategy.bases else None
    methods = {node.name: _lines(source, node) for node in strategy.body if isinstance(node, ast.FunctionDef)}
    if base and base.startswith("_"):  # no strategy by itself: what it defines stands with those that extend it
        shared, base = definitions(base)
        methods = shared | methods
    return methods, base


def helpers(name: str) -> list[list[str]]:
    source = registry.path(name).read_text(encoding="utf-8")
    return [
        _lines(source, node)
        for node in ast.parse(source).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name != "Strategy"
    ]


def _lines(source: str, node) -> list[str]:
    """The lines of a function or class; without its docstring, and a function's without types."""
    kept = source.splitlines()[: node.end_lineno]
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if isinstance(node, ast.ClassDef) or not body:
        return kept[node.lineno - 1 :]
    for argument in (*node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg):
        if argument:
            argument.annotation = None
    indent = " " * node.col_offset
    decorators = [f"{indent}@{ast.unparse(decorator)}" for decorator in node.decorator_list]
    first = body[0].lineno
    while kept[first - 2].lstrip().startswith("#"):
        first -= 1
    return [*decorators, f"{indent}def {node.name}({ast.unparse(node.args)}):", *kept[first - 1 :]]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE.relative_to(Path.cwd())} is written")
