"""Say in a few minutes what a machine can do: which rows train the same model, and how fast they are.

For a new node, a new driver, a new image; needs no network. First rows are proven, several at a time, as nothing is
timed then; then rows are timed, one after the other, beside a bare loop; then the rest is proven, as far as the time
goes. What it finds is in accept.json after each of them, in a folder to hand on (results/accept).

Exit code 1 where a row is wrong (it trains another model, though not by its nature, or its trial failed), where a timed
row failed, and where nothing was proven at all.
"""

import os
import time
from pathlib import Path

# Before PyTorch is imported: to ask for GPUs would begin CUDA, which no fork of this process could use then; and the
# ranks, which are forks, are told their threads later.
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
    parser.add_argument("--minutes", type=float, default=8.0, help="after which it ends with what it has")
    parser.add_argument("--keep", action="store_true", help="keep prepared data and checkpoints in the folder, too")
    arguments = parser.parse_args()
    if not arguments.minutes > 0:
        raise BadInput(f"--minutes {arguments.minutes:g}: give more than 0.")
    from lockstep.proof import acceptance  # imports PyTorch, which --help needs not wait for

    accepted = acceptance.Acceptance(Path(arguments.results), began + 60 * arguments.minutes)
    accepted.run(lambda line: print(line, flush=True))
    print_table(*accepted.proof_table())
    print_table(*accepted.time_table())
    for line in accepted.last_lines():
        print(line)
    if not arguments.keep:
        accepted.tidy()
    return int(not accepted.passed)


if __name__ == "__main__":
    cli.run(main)
