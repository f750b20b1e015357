"""Does a change of your repository train the same model as before, and is it not slower? For CI, or before you push.

    lockstep gate --against main --fail-if-slower 5% -- torchrun --nproc-per-node 2 train.py

The working tree and the commit where it parted from --against run the same command, in copies. First their models are
compared step by step, as in `lockstep prove`. Then both are timed in turns, in blocks, and the ratio of their seconds
per optimizer step gets an interval. A change passes once the interval lies below the limit, and fails if it lies above
it after the last block. If it does neither, the gate is undecided.

The exit code is 0 if it passed or is undecided, 1 if the change is slower or trains another model, 2 if it was called
wrongly, 3 if undecided and --strict, and 4 if it could not be measured.
"""

import argparse
import math
import os
import re
import shutil
import sys
import tempfile
import traceback
from dataclasses import asdict
from pathlib import Path

from lockstep import cli, files
from lockstep.errors import BadInput, RunFailed, RunStopped, tell
from lockstep.script import commits, gate, gate_report

EXIT = {gate.PASSED: 0, gate.UNDECIDED: 0, gate.SLOWER: 1, gate.UNEQUAL: 1, gate.NOT_MEASURED: 4}
STRICT = 3
JSON, COMMENT, JUNIT = "gate.json", "gate.md", "gate.xml"


def main() -> int:
    """Run the gate. The exit code 1 is a verdict, so nothing else may end with it."""
    try:
        return _main()
    except (BadInput, RunStopped):
        raise
    except RunFailed as error:
        tell(f"gate could not measure: {error}", sys.stderr, bad=True)
    except Exception:
        traceback.print_exc()
    return EXIT[gate.NOT_MEASURED]


def _main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    defaults = gate.Asked
    parser.add_argument("--against", required=True, metavar="COMMIT", help="a branch, tag or commit to compare with")
    parser.add_argument("--fail-if-slower", default="5%", metavar="P%", help="the limit (default: 5%%)")
    parser.add_argument(
        "--blocks", type=int, default=defaults.blocks, help="the most blocks of two runs (default: %(default)s)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=defaults.minutes,
        help="begin no block that would end later (default: %(default)g)",
    )
    parser.add_argument(
        "--steps", type=int, default=defaults.steps, help="timed steps of a run (default: about 3 seconds of them)"
    )
    parser.add_argument(
        "--warm-up", type=int, default=defaults.warm_up, help="steps of a run that are not timed (default: %(default)s)"
    )
    parser.add_argument("--share", action="append", default=[], metavar="PATH", help="untracked data that both need")
    parser.add_argument("--keep-dropout", action="store_true", help="keep dropout when models are compared")
    parser.add_argument(
        "--patience", type=float, default=defaults.patience, help="seconds without a step that count as hanging"
    )
    parser.add_argument("--strict", action="store_true", help=f"exit with {STRICT} if undecided")
    parser.add_argument("--output", type=Path, help=f"a new folder for {JSON}, {COMMENT}, {JUNIT} and all logs")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command that starts the training")
    arguments = parser.parse_args()
    asked = _asked(arguments)
    repository = commits.top(Path.cwd())
    with tempfile.TemporaryDirectory(prefix="lockstep-", ignore_cleanup_errors=True) as temporary:
        work = Path(temporary).resolve()
        shared = [Path(os.path.normpath(Path.cwd().resolve() / name)) for name in arguments.share]
        base, ours = commits.copies(repository, arguments.against, work / "trees", shared)
        print(f"{ours.name} ({ours.commit[:10]}) against {base.name} ({base.commit[:10]})", flush=True)
        if lacking := commits.lacks(ours):
            print(f"note: the copies have no submodules; if they are needed: --share {' --share '.join(lacking)}")
        outcome = gate.run(base, ours, asked, repository, work / "runs", lambda line: print(line, flush=True), shared)
        if arguments.output:
            _write(outcome, work / "runs", arguments.output)
    print(f"{gate_report.headline(outcome)}: {outcome.reason}")
    print(gate_report.conditions(outcome))
    if outcome.verdict == gate.UNDECIDED and arguments.strict:
        return STRICT
    return EXIT[outcome.verdict]


def _asked(arguments: argparse.Namespace) -> gate.Asked:
    example = "lockstep gate --against main -- python train.py"
    command = cli.users_command(arguments.command, example)
    if arguments.command[0] != "--":  # options after the command would be taken for its own, without a word
        raise BadInput(f"write -- between the gate's options and your command, as in: {example}")
    given = re.fullmatch(r"(\d+(?:\.\d+)?)%", arguments.fail_if_slower.strip())
    if not given or not math.isfinite(float(given[1])):
        raise BadInput(f"--fail-if-slower {arguments.fail_if_slower}: give a share with its sign, as 5%")
    if arguments.blocks < gate.FEWEST_BLOCKS:
        raise BadInput(f"--blocks {arguments.blocks}: at least {gate.FEWEST_BLOCKS} are needed for an interval")
    if not arguments.minutes > 0:
        raise BadInput(f"--minutes {arguments.minutes:g}: give more than 0")
    if not arguments.patience > 0:
        raise BadInput(f"--patience {arguments.patience:g}: give more than 0 seconds")
    if arguments.warm_up < 1:
        raise BadInput(f"--warm-up {arguments.warm_up}: at least 1 is needed, after which the clock starts")
    if arguments.steps < 0 or 0 < arguments.steps < gate.recording.FEWEST:
        raise BadInput(f"--steps {arguments.steps}: at least {gate.recording.FEWEST} are needed")
    cli.must_be_new(arguments.output)
    if arguments.output:
        _must_be_writable(arguments.output.parent)
    return gate.Asked(
        command=command,
        slower=float(given[1]) / 100,
        blocks=arguments.blocks,
        minutes=arguments.minutes,
        steps=arguments.steps,
        warm_up=arguments.warm_up,
        patience=arguments.patience,
        keep_dropout=arguments.keep_dropout,
    )


def _must_be_writable(folder: Path) -> None:
    """Make a folder. Raise BadInput if files can't be written in it, which would otherwise be known after all runs."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise BadInput(f"--output: {folder} can't be written ({error.strerror}). Name another folder.") from None


def _write(outcome: gate.Outcome, runs: Path, output: Path) -> None:
    """Write the outcome in all forms, and each run's log."""
    with files.atomic_folder(output) as folder:
        files.write_json(folder / JSON, asdict(outcome))
        files.write_text(folder / COMMENT, gate_report.comment(outcome))
        files.write_text(folder / JUNIT, gate_report.junit(outcome))
        for log in sorted(runs.glob("*/log.txt")):
            shutil.copy2(log, folder / f"{log.parent.name}.txt")


if __name__ == "__main__":
    cli.run(main)
