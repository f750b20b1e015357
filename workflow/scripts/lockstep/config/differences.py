"""The difference between a strategy's file and single's, as a diff."""

import ast
import difflib
import re

from lockstep.config import registry


def difference(name: str) -> str:
    """A diff of single's methods and the strategy's, followed by the file's other functions and classes."""
    single, own = definitions("single")[0], definitions(name)[0]
    lines = []
    for method, text in own.items():
        changed = difflib.unified_diff(single.get(method, []), text, n=1000, lineterm="")
        lines += [*list(changed)[3:], ""]
    for function in helpers(name):
        lines += [*(f"+{line}" for line in function), ""]
    return "\n".join(lines)


def inherited(name: str) -> str:
    """The methods that a strategy inherits from strategies other than single, as lines of Markdown."""
    lines, has = [], set(definitions(name)[0])
    while (name := definitions(name)[1]) not in (None, "single"):
        taken = [method for method in definitions(name)[0] if method not in has]
        has.update(taken)
        if taken:
            lines.append(f"As in [{name}](#{name}): {', '.join(f'`{method}`' for method in taken)}.\n")
    return "\n".join(lines)


def without_folders(command: str) -> str:
    """A command as one would type it: programs without their folders."""
    return re.sub(r"\S*/bin/", "", re.sub(r"\S*/bin/python[\d.]*", "python", command))


def definitions(name: str) -> tuple[dict[str, list[str]], str | None]:
    """The methods in a strategy's file, as lines by name, and the strategy that its class extends."""
    source = registry.path(name).read_text(encoding="utf-8")
    (strategy,) = [
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "Strategy"
    ]
    parent = ast.unparse(strategy.bases[0]).removesuffix(".Strategy") if strategy.bases else None
    methods = {node.name: _lines(source, node) for node in strategy.body if isinstance(node, ast.FunctionDef)}
    if parent and parent.startswith("_"):  # not a strategy itself, so its methods are shown with its subclasses
        shared, parent = definitions(parent)
        methods = shared | methods
    return methods, parent


def helpers(name: str) -> list[list[str]]:
    source = registry.path(name).read_text(encoding="utf-8")
    return [
        _lines(source, node)
        for node in ast.parse(source).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name != "Strategy"
    ]


def _lines(source: str, node) -> list[str]:
    """The lines of a function or class without its docstring; a function also loses its type annotations."""
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
