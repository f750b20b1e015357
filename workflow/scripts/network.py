"""Measure what communication between the ranks of this machine costs: five operations, from 1 KiB to 256 MiB.

Each gets a latency and a bandwidth, fitted to its times. Bandwidth is nccl-tests' bus bandwidth, which is comparable
between operations and numbers of ranks. It measures one machine.
"""

from lockstep import cli, network
from lockstep.errors import BadInput
from lockstep.paths import network_file
from lockstep.terminal import print_table, short

COLUMNS = ["ranks", "operation", "latency, µs", "bandwidth, GB/s", "largest error of the fit", "GB/s at the largest"]


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument(
        "--ranks", type=int, nargs="+", metavar="N", help="numbers of ranks; by default 2, and 4 if there are 4 devices"
    )
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="by default that of hardware.backend")
    parser.add_argument("--largest", type=int, default=256, metavar="MIB", help="the size of the largest message")
    arguments = parser.parse_args()
    if arguments.ranks and min(arguments.ranks) < 2:
        raise BadInput(f"--ranks {min(arguments.ranks)}: it takes at least two to communicate.")
    if not 1 <= arguments.largest <= 4096:
        raise BadInput(f"--largest {arguments.largest}: expected 1 to 4096 MiB.")
    measured = network.all_of(
        cli.configuration(arguments),
        arguments.results,
        arguments.ranks,
        arguments.backend,
        arguments.largest * 2**20,
        lambda line: print(line, flush=True),
    )
    print_table(COLUMNS, [_line(each, name) for each in measured for name in each["operations"]])
    for each in measured:
        for why in each["disturbed"]:
            print(f"disturbed, with {each['ranks']} ranks: {why}")
    print(f"all sizes: {network_file(arguments.results)}")


def _line(measured: dict, name: str) -> list[str]:
    fitted = measured["operations"][name]
    bandwidth = "-" if fitted["bandwidth"] is None else f"{fitted['bandwidth'] / 1e9:.3g}"
    return [
        str(measured["ranks"]),
        name,
        short(1e6 * fitted["latency"]),
        bandwidth,
        f"{100 * fitted['worst']:.0f} %",
        f"{fitted['points'][-1]['bus_bandwidth'] / 1e9:.3g}",
    ]


if __name__ == "__main__":
    cli.run(main)
