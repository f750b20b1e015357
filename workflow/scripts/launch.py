"""Train one row of the table: start its processes, watch them, and write the run's record."""

from lockstep import cli, runs
from lockstep.errors import BadInput


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--row", required=True, help="a name under rows in the configuration")
    parser.add_argument("--repeat", type=int, default=1, help="which repetition this is, from 1")
    arguments = parser.parse_args()
    config = cli.configuration(arguments)
    if arguments.row not in config.rows:
        raise BadInput(f"--row {arguments.row}: no such row. The configuration has: {', '.join(config.rows)}.")
    record = runs.run(config, config.rows[arguments.row], arguments.repeat, arguments.results)
    print(
        f"{record['row']}: {record['steps']} steps in {record['clock']['train_seconds']:.2f} s,"
        f" {record['throughput']['samples_per_second']:.0f} samples/s, final loss {record['losses'][-1]:.4f}"
    )


if __name__ == "__main__":
    cli.run(main)
