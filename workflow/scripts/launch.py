"""Train one row of the table: start its processes, watch them, and write the run's record."""

from pathlib import Path

from lockstep import cli
from lockstep.errors import BadInput
from lockstep.run import runs


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--row", required=True, help="a name under rows in the configuration")
    parser.add_argument("--repeat", type=int, default=1, help="which repetition this is, from 1")
    parser.add_argument("--profile", action="store_true", help="a few steps instead, to see where a step's time goes")
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FOLDER",
        help="go on from the latest state saved in this run's folder, whatever number of processes saved it",
    )
    arguments = parser.parse_args()
    config = cli.configuration(arguments)
    if arguments.row not in config.rows:
        raise BadInput(f"--row {arguments.row}: no such row. The configuration has: {', '.join(config.rows)}.")
    row = config.rows[arguments.row]
    if arguments.profile and not config.profile.steps:
        raise BadInput("--profile: profile.steps is 0, which is none. Set it, as in --set profile.steps=8.")
    if arguments.profile:
        print(runs.profile(config, row, arguments.results))
        return
    row = config.repetition(row, arguments.repeat)
    record = runs.run(config, row, arguments.repeat, arguments.results, arguments.resume)
    print(
        f"{record['row']}: {record['steps']} steps in {record['clock']['train_seconds']:.2f} s,"
        f" {record['throughput']['samples_per_second']:.0f} samples/s, final loss {record['losses'][-1]:.4f}"
    )


if __name__ == "__main__":
    cli.run(main)
