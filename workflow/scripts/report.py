"""Gather what all runs left into the report: page, Markdown, CSV and JSON; print the table."""

from lockstep import cli, reporting
from lockstep.terminal import print_table


def main() -> None:
    arguments = cli.parser(__doc__).parse_args()
    config, folder = cli.configuration(arguments), arguments.results / "report"
    summary = reporting.gather(config, arguments.results)
    reporting.write(summary, folder, arguments.results / "predict" / "predictions.csv")
    print_table(*reporting.shown(summary["rows"]))
    for row in summary["rows"]:
        if row["status"] != "ok":
            print(f"{row['row']} {row['status']}: {row['reason']}")
    print("\n".join(summary["headline"]))
    print(f"report: {folder / 'report.html'}")


if __name__ == "__main__":
    cli.run(main)
