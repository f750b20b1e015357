"""Keep the current results under a name, to compare later ones with; data and weights are not kept."""

from pathlib import Path

from lockstep import cli, paths
from lockstep.report import history


def main() -> None:
    parser = cli.parser(__doc__, configured=False)
    parser.add_argument("name", help="a folder's name, such as v2 or before-the-change")
    parser.add_argument("--history", type=Path, default=paths.HISTORY, help="the folder of kept results")
    arguments = parser.parse_args()
    print(f"kept: {history.keep(arguments.results, arguments.name, arguments.history)}")


if __name__ == "__main__":
    cli.run(main)
