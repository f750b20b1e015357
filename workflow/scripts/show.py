"""Show what you would write in your own script for a row: the difference from `single`, and the command."""

import json
import re
import sys
import tempfile
from pathlib import Path

from lockstep import cli
from lockstep.config import registry
from lockstep.config.differences import difference, inherited, without_folders
from lockstep.config.row import Row
from lockstep.errors import BadInput
from lockstep.paths import PROJECT
from lockstep.run import node
from lockstep.run.addresses import Rendezvous


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("row", help="a name under rows in the configuration; with --script, also a strategy")
    parser.add_argument("--script", action="store_true", help="print a whole script that trains by the row's strategy")
    arguments = parser.parse_args()
    config = cli.configuration(arguments)
    has_row = arguments.row in config.rows
    if arguments.script and not has_row and arguments.row in registry.own_scripts():
        print(own_script(arguments.row).read_text(encoding="utf-8"), end="")
        return
    if not has_row and arguments.row in registry.names():
        raise BadInput(
            f"{arguments.row}: is a strategy, but not a row of this configuration. To add it as a row:"
            f" --set 'rows.{arguments.row}={{strategy: {arguments.row}}}'"
        )
    config.require_row(arguments.row, arguments.row)
    row = config.rows[arguments.row]
    if arguments.script:
        print(own_script(row.strategy).read_text(encoding="utf-8"), end="")
        for note in not_in_script(row, config.source["rows"][row.name] or {}):
            print(f"note: {note}", file=sys.stderr)
        return
    file = registry.path(row.strategy)
    print(f"# {row.name}: {row.strategy}, in {file.relative_to(PROJECT)}")
    if row.strategy == "single":
        print(file.read_text(encoding="utf-8"))
    else:
        print(f"# What differs from single (- as single does it, + as {row.strategy} does)")
        print(difference(row.strategy))
        print(re.sub(r"\[(\w+)\]\(#\w+\)", r"\1", inherited(row.strategy)))  # without Markdown's links
    if row.options:
        print(f"# Its options: {json.dumps(row.options)}")
    if row.hardware.nodes > 1:
        print(f"# What starts it\n{node.show(row, arguments.results, 1, 0)}")
        return
    with tempfile.TemporaryDirectory() as folder:  # some launchers need a file
        words = row.command(Path(folder), Rendezvous("PORT"))
        plain = without_folders(" ".join(words)).replace(folder, str(arguments.results / row.folder(1)))
        print(f"# What starts it\n{plain.replace(f'{PROJECT}/', '')}\n")
        print(f"# The same with all that Lockstep sets besides\n{node.show(row, arguments.results, 1, 0)}")
        for given in sorted(Path(folder).iterdir()):
            print(f"# {arguments.results / row.folder(1) / given.name}\n{given.read_text(encoding='utf-8')}")


def own_script(strategy: str) -> Path:
    """The file of a whole script with a strategy, independent of Lockstep. Raises BadInput if there is none."""
    there = registry.own_scripts()
    if strategy not in there:
        raise BadInput(f"--script: there is none for {strategy}. There are: {', '.join(sorted(there))}.")
    return there[strategy]


def not_in_script(row: Row, asked: dict) -> list[str]:
    """What the benchmark gives this row besides what a script of its strategy has. asked: the row as it was written."""
    notes = [f"the benchmark starts each process of {row.name} with OMP_NUM_THREADS={row.hardware.threads}"]
    if further := {key: value for key, value in asked.items() if key not in ("strategy", "threads")}:
        notes.append(f"{row.name} asks for more, which may not be in the script: {json.dumps(further)}")
    return notes


if __name__ == "__main__":
    cli.run(main)
