"""Tables in a terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.errors import printable


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """A table on stdout; numbers to the right. Into a file or a pipe it is as wide as it needs to be."""
    table = Table()
    for column, name in enumerate(header):
        numeric = all(row[column].lstrip("-").replace(".", "", 1).isdecimal() or not row[column] for row in rows)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(_one_line, row))
    console = Console()
    console.print(table) if console.is_terminal else Console(width=1000).print(table)


def _one_line(cell: str) -> Text:
    """As Text, because "[泪]" is no markup."""
    return Text(printable(cell).strip())
