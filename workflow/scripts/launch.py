"""Train one row of the table: start its processes, watch them, and write the run's record."""

from lockstep import cli
from lockstep.errors import BadInput
from lockstep.run import runs


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--row", required=True, help="a name under rows in the configuration")
    parser.add_argument("--repeat", type=int, default=1, help="which repetition this is, from 1")
    parser.add_argument("--profile", action="store_true", help="a few steps instead, to see where a step's time goes")
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
    record = runs.run(config, config.repetition(row, arguments.repeat), arguments.repeat, arguments.results)
    print(
        f"{record['row']}: {record['steps']} steps in {record['clock']['train_seconds']:.2f} s,"
        f" {record['throughput']['samples_per_second']:.0f} samples/s, final loss {record['losses'][-1]:.4f}"
    )


if __name__ == "__main__":
    cli.run(main)
