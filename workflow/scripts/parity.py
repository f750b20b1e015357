"""Prove that a row trains the same model as single: hold a few steps of both side by side."""

from lockstep import cli, parity
from lockstep.errors import BadInput
from lockstep.terminal import print_table


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--row", action="append", help="a row of the configuration, or reference, which must be first")
    arguments = parser.parse_args()
    config, lines = cli.configuration(arguments), []
    names = arguments.row or [parity.REFERENCE, *config.rows]
    for name in names:
        if name not in (parity.REFERENCE, *config.rows):
            raise BadInput(f"--row {name}: no such row. The configuration has: {', '.join(config.rows)}.")
        verdict = parity.prove(config, config.rows.get(name), arguments.results)
        found = [f"{value:.1e}" for value in verdict["found"].values()] if verdict["found"] else [""] * 4
        lines.append([name, verdict["proof"], *found, verdict["reason"] or verdict["lossy"]])
    print_table(["row", "same model?", "losses", "gradient norm", "weights", "update", "why"], lines)


if __name__ == "__main__":
    cli.run(main)
