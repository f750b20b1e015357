"""Forget the runs that were disturbed, so that the workflow trains them once more. `make again` does both."""

from lockstep import cli
from lockstep.files import read_json


def main() -> None:
    arguments = cli.parser(__doc__, configured=False).parse_args()
    found = sorted(arguments.results.glob("runs/*/*/*/record.json"))
    disturbed = {file: read_json(file)["watch"]["disturbed"] for file in found}
    for file, reasons in disturbed.items():
        if reasons:
            file.unlink()
            print(f"{file.parent}: {'; '.join(reasons)}; it will be repeated")
    print(f"{sum(map(bool, disturbed.values()))} of {len(found)} runs were disturbed")


if __name__ == "__main__":
    cli.run(main)
