"""Search for this machine's fastest recipe, and write it as a row that a configuration can include."""

import csv

import yaml

from lockstep import cli, paths, tuning
from lockstep.files import atomic_file, read_json, write_text
from lockstep.run import lifetime


def main() -> None:
    arguments = cli.parser(__doc__).parse_args()
    config, folder = cli.configuration(arguments), paths.tune_folder(arguments.results)
    with lifetime.hold(folder):
        tries = tuning.search(config, arguments.results, lambda line: print(line, flush=True))
    with atomic_file(folder / paths.TRIES) as temporary, temporary.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, tries[0])
        writer.writeheader()
        writer.writerows(tries)
    winner = tuning.winner(tries)
    text = yaml.safe_dump({"rows": {"tuned": winner}}, sort_keys=False)
    file, model, data = folder / paths.TUNED, config.model, read_json(paths.data_file(arguments.results))
    size = f" of {model.layers} layers, {model.hidden_size} wide" if model.name == "scratch" else ""
    about = [
        f"Found with {data['source']}, a {model.name} model{size}, {config.train.global_batch} samples a step.",
        f"With the same configuration: snakemake --cores all --configfile ... {file}",
    ]
    write_text(file, "".join(f"# {line}\n" for line in about) + text)
    print(f"tuned: {', '.join(f'{key}: {value}' for key, value in winner.items())}")
    print(f"to train it with the other rows: snakemake --cores all --configfile {file}")


if __name__ == "__main__":
    cli.run(main)
