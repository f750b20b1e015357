"""Search for this machine's fastest recipe, and write it as a row that a configuration can include."""

import csv

import yaml

from lockstep import cli, tuning
from lockstep.files import atomic_file, write_text


def main() -> None:
    arguments = cli.parser(__doc__).parse_args()
    config, folder = cli.configuration(arguments), arguments.results / "tune"
    tries = tuning.search(config, arguments.results, lambda line: print(line, flush=True))
    with atomic_file(folder / "tries.csv") as temporary, temporary.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, tries[0])
        writer.writeheader()
        writer.writerows(tries)
    found = tuning.winner(tries)
    text = yaml.safe_dump({"rows": {"tuned": found}}, sort_keys=False)
    write_text(folder / "tuned.yaml", f"# snakemake --cores all --configfile {folder / 'tuned.yaml'}\n{text}")
    print(f"tuned: {', '.join(f'{key}: {value}' for key, value in found.items())}")
    print(f"to train it beside the other rows: snakemake --cores all --configfile {folder / 'tuned.yaml'}")


if __name__ == "__main__":
    cli.run(main)
