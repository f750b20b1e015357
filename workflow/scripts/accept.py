"""Find out in a few minutes what a machine can do: which rows train the same model, and how fast they are.

It is for a new node, driver or image, and needs no network. First, rows are proven in parallel, since proofs are not
timed. Then rows are timed in turn, and compared with a bare loop. Then further rows are proven until the time is up.
Each result is written to accept.json at once, in a folder to pass on (results/accept).

The exit code is 1 if a row is wrong (it trains another model and is not designed to, or its trial failed), if a timed
row failed, or if nothing was proven.
"""

import os
import time
from pathlib import Path

# These must be set before PyTorch is imported. Otherwise counting GPUs would initialise CUDA, which forks of this
# process could not use then. The ranks, which are forks, set their number of threads later.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

from lockstep import cli, paths
from lockstep.errors import BadInput
from lockstep.terminal import print_table

RESULTS = paths.RESULTS / "accept"


def main() -> int:
    began = time.monotonic()
    parser = cli.parser(__doc__, configured=False)
    parser.set_defaults(results=RESULTS)
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="the time after which it ends with its results so far"
    )
    parser.add_argument(
        "--config",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="prove the same rows, and those that it adds, for another task or model, by this configuration; may be"
        " repeated",
    )
    parser.add_argument("--no-times", action="store_true", help="prove only")
    parser.add_argument("--keep", action="store_true", help="keep prepared data and checkpoints in the folder, too")
    arguments = parser.parse_args()
    if not arguments.minutes > 0:
        raise BadInput(f"--minutes {arguments.minutes:g}: give more than 0.")
    from lockstep.proof import acceptance  # imports PyTorch, for which --help should not wait

    deadline = began + 60 * arguments.minutes
    accepted = acceptance.Acceptance(Path(arguments.results), deadline, tuple(arguments.config), not arguments.no_times)
    accepted.run(lambda line: print(line, flush=True))
    print_table(*accepted.proof_table())
    if not arguments.no_times:
        print_table(*accepted.time_table())
    for line in accepted.last_lines():
        print(line)
    if not arguments.keep:
        accepted.tidy()
    return int(not accepted.passed)


if __name__ == "__main__":
    cli.run(main)
