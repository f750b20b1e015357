"""Train one row of the table: start its processes, watch them, and write the run's record."""

import os
import shlex
import sys
import time
from pathlib import Path

from lockstep import cli, paths
from lockstep.config.configuration import Config
from lockstep.errors import BadInput
from lockstep.run import addresses, follower, node, peers, runs
from lockstep.run.progress import VIEW


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--row", help="a name under rows in the configuration")
    parser.add_argument("--repeat", type=int, default=1, help="the number of this repetition, from 1")
    parser.add_argument("--profile", action="store_true", help="profile a few steps, to see where a step's time goes")
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FOLDER",
        help="resume from the latest state saved in this run's folder, by any number of processes",
    )
    several = parser.add_argument_group("several machines (docs/several-machines.md)")
    several.add_argument("--nodes", type=int, help="the number of machines; short for --set hardware.nodes=N")
    several.add_argument("--node-rank", type=int, help="the number of this machine, from 0; srun sets it itself")
    several.add_argument("--print", action="store_true", help="print the command for this machine without running it")
    arguments = parser.parse_args()
    if arguments.node_rank and not arguments.row and _by_node_0(arguments):
        follower.follow(lambda: _configuration(arguments), arguments.results, arguments.node_rank, None)
        return
    config = _configuration(arguments)
    if arguments.row is not None:
        config.require_row(arguments.row, f"--row {arguments.row}")
    row = config.rows[arguments.row] if arguments.row else None
    most = max([config.hardware.nodes, *(each.asked.nodes for each in config.rows.values())])
    several_machines = config.hardware.nodes if row and row.hardware.nodes == 1 else 0  # the row uses only one of them
    rank = addresses.node_rank(arguments.node_rank, max(row.asked.nodes, several_machines) if row else most)
    if row is None and not rank:
        raise BadInput(
            "--row: name a row. Only nodes other than node 0 may leave it out; they train the row that node 0 names."
        )
    if rank and row and row.hardware.nodes == 1:
        raise BadInput(f"--node-rank {rank}: {row.name} trains on one machine, which is node 0.")
    if arguments.print:
        if row is None:
            raise BadInput("--print: name a row, by --row.")
        for number in range(row.hardware.nodes if row.hardware.nodes > 1 else 0):
            print(f"# on node {number}\n{_typed(number)}")
        shown = config.profiled(row) if arguments.profile else row
        shown.refuse()
        print(f"# starts on node {rank}\n{node.show(shown, arguments.results, arguments.repeat, rank)}")
        return
    if rank:
        follower.follow(lambda: _configuration(arguments), arguments.results, rank, row)
        return
    if arguments.profile and not config.profile.steps:
        raise BadInput(
            "--profile: profile.steps is 0, so there is nothing to profile. Set it, as in --set profile.steps=8."
        )
    if arguments.profile:
        print(runs.profile(config, row, arguments.results))
        return
    row = config.repetition(row, arguments.repeat)
    record = runs.run(config, row, arguments.repeat, arguments.results, arguments.resume)
    if VIEW in os.environ:  # the view shows the result
        return
    print(
        f"{record.row}: {record.steps} steps in {record.clock.train_seconds:.2f} s,"
        f" {record.throughput.samples_per_second:.0f} samples/s, final loss {record.losses[-1]:.4f}"
    )


def _typed(rank: int) -> str:
    """This command for node `rank`, without --print."""
    words = [word for word in sys.argv if word != "--print" and not word.startswith("--node-rank=")]
    if "--node-rank" in words:
        at = words.index("--node-rank")
        del words[at : at + 2]
    return shlex.join(["python", *words, "--node-rank", str(rank)])


def _by_node_0(arguments) -> bool:
    """Whether the configuration is the one that node 0's Snakemake writes into the results; waits until it exists."""
    written = paths.config_file(arguments.results)
    if getattr(arguments, "config", None) != [written] or arguments.print:
        return False
    if not written.exists():
        print(f"waiting for {written}, which Snakemake writes on node 0", flush=True)
    while not written.exists():
        time.sleep(peers.POLL)
    return True


def _configuration(arguments) -> Config:
    """The configuration with --nodes, and with the rendezvous from a scheduler's environment."""
    if arguments.nodes is not None:
        arguments.set.append(f"hardware.nodes={arguments.nodes}")
    config = cli.configuration(arguments)
    endpoint = addresses.environment_endpoint()
    if config.hardware.nodes > 1 and not config.hardware.endpoint and endpoint:
        arguments.set.append(f"hardware.endpoint={endpoint}")
        config = cli.configuration(arguments)
    return config


if __name__ == "__main__":
    cli.run(main)
