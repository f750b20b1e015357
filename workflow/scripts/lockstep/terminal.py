"""Print tables in a terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.errors import printable

BAD = ("failed", "NOT equal", "trial failed", "unequal")  # cells that are red
FOLDED = 24  # longer texts (in characters) may be wrapped before a column is dropped


def print_table(header: list[str], rows: list[list[str]], spared: tuple[str, ...] = ()) -> None:
    """Print a table on stdout, with numbers right-aligned. In a file or pipe it is as wide as needed.

    If a terminal is too narrow, the columns in `spared` are dropped, in this order.
    """
    console = Console()
    for name in spared if console.is_terminal else ():
        widths = [min(max(map(len, column)), FOLDED) for column in zip(header, *rows, strict=True)]
        if sum(width + 3 for width in widths) + 1 > console.width and name in header:
            at = header.index(name)
            header, *rows = [line[:at] + line[at + 1 :] for line in (header, *rows)]
    table = Table()
    for column, name in enumerate(header):
        numeric = all(row[column].lstrip("-").replace(".", "", 1).isdecimal() or not row[column] for row in rows)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(_one_line, row))
    wide = console if console.is_terminal else Console(width=1000)
    wide.print(table)


def within(value: float, low: float, high: float) -> str:
    """A number with the ends of its interval, as in "10.1 (9.4 to 11.9)"; alone if it has none."""
    return f"{short(value)} ({short(low)} to {short(high)})" if low < high else short(value)


def short(value: float) -> str:
    """A number with three significant digits, never as 1e+03."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"


def _one_line(cell: str) -> Text:
    """A cell as Text, since rich would take "[泪]" for markup."""
    return Text(printable(cell).strip(), style="red" if cell in BAD else "")
