"""Does your own script, unchanged, train the same model on several devices as on one?

    lockstep prove -- torchrun --nproc-per-node 2 train.py --epochs 1
    lockstep prove --against "python single.py" -- torchrun --nproc-per-node 2 train.py

The command is run for a few optimizer steps, with a recorder in each of its processes. Then its script is run as one
process, on the samples of all ranks, from the same weights, and once more with each batch reversed, which shows how far
rounding alone goes. The first difference is reported, with its cause if that is known.
The exit code is 1 if another model is trained, 3 if that can't be told, and 4 if Lockstep itself failed.
"""

import argparse
import contextlib
import shlex
import shutil
import sys
import tempfile
import traceback
from dataclasses import asdict, replace
from pathlib import Path

from lockstep import cli, files, paths
from lockstep.errors import BadInput, RunFailed, RunStopped, tell
from lockstep.script import findings, page, pretended, recording
from lockstep.terminal import print_table

SAYS = {
    findings.EQUAL: "The same model as on one process",
    findings.DIFFERENT: "Not the model that it should be.",
    findings.UNTOLD: "Whether it is the same model can't be told",
}
PAGE = "proof.html"
EXIT = {findings.EQUAL: 0, findings.DIFFERENT: 1, findings.UNTOLD: 3}
FAILED = 4


def main() -> int:
    """Prove a script. The exit code 1 is a verdict, so no error may end with it."""
    try:
        return _main()
    except (BadInput, RunStopped, BrokenPipeError):
        raise
    except Exception:
        traceback.print_exc()
        tell("Whether it is the same model can't be told, as Lockstep itself failed.", sys.stderr, bad=True)
    return FAILED


def _main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps to compare (default: 8)")
    parser.add_argument("--keep-dropout", action="store_true", help="keep dropout, which is otherwise disabled")
    parser.add_argument("--against", metavar="COMMAND", help="compare with another command, on its own samples")
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="rehearse on N pretended GPUs")
    parser.add_argument("--patience", type=float, default=600, help="seconds without a step that count as hanging")
    parser.add_argument("--output", type=Path, help=f"a folder for {PAGE}, verdict.json and the recordings")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command that starts the script")
    arguments = parser.parse_args()
    command = cli.users_command(arguments.command, "lockstep prove -- torchrun ... train.py")
    if arguments.gpus < 0:
        raise BadInput(f"--gpus {arguments.gpus}: give the number of pretended GPUs.")
    cli.must_be_new(arguments.output)
    if arguments.steps < 1:
        raise BadInput(f"--steps {arguments.steps}: at least 1 is needed.")
    asked = recording.Asked(arguments.steps, arguments.keep_dropout, arguments.patience, arguments.gpus)
    with tempfile.TemporaryDirectory(prefix="lockstep-") as temporary:
        try:
            verdict = _prove(command, arguments.against, Path(temporary), asked)
        except RunStopped:
            raise
        except recording.OthersIdle as error:
            verdict = findings.idle(error)
        except RunFailed as error:
            verdict = findings.Verdict(findings.UNTOLD, str(error), [])
        verdict = replace(verdict, findings=sorted(verdict.findings, key=findings.severity))
        if arguments.output:
            files.write_json(Path(temporary) / paths.VERDICT, asdict(verdict))
            files.write_text(Path(temporary) / PAGE, page.page(verdict, shlex.join(command), arguments.gpus))
            shutil.copytree(temporary, arguments.output, dirs_exist_ok=True)
    _print(verdict)
    if arguments.output:
        print(f"page: {arguments.output / PAGE}")
    if arguments.gpus:
        print(f"{pretended.CANNOT_KNOW}.")
    return EXIT[verdict.answer]


def _prove(command: list[str], against: str | None, folder: Path, asked: recording.Asked) -> findings.Verdict:
    recorded = recording.record(command, folder / "recorded", asked)
    print(f"\nrecorded {recorded.steps} steps of {recorded.world} ranks", flush=True)
    if how := recorded.broken_off(asked.steps):
        return findings.untold(f"the command {how}", findings.between_ranks(recorded))
    if against:
        other = recording.record(shlex.split(against), folder / "against", asked)
        if how := other.broken_off(asked.steps):
            return findings.untold(f"the other command {how}", findings.between_ranks(recorded))
        for by in map(findings.divided, (recorded, other)):
            if by in (findings.STAGES, findings.FLAT):
                return findings.untold(f"ranks hold parts of the model ({by}), which are not compared", [])
        found, untold = _two_scripts(recorded, other, folder, asked)
        found = findings.between_ranks(recorded) + found
        if untold:
            return findings.untold(untold, found)
        steps = min(recorded.steps, other.steps)
        if recorded.steps != other.steps:
            says = f"training ends after {recorded.steps} steps, against {other.steps}"
            found.append(findings.Finding("length", findings.DIFFERENT, says, step=steps + 1))
        wrong = findings.wrong_of(found)
        if not wrong and (reason := findings.size_unknown(recorded, other)):
            return findings.untold(reason, found)
        answer = findings.DIFFERENT if wrong else findings.EQUAL
        reason = wrong[0].says if wrong else f"both scripts did the same in each of {steps} steps"
        return findings.Verdict(answer, reason, found)
    if reason := findings.incomparable(recorded):
        return findings.untold(reason, findings.between_ranks(recorded))
    try:
        alone = recording.replay(recorded, folder / "alone", asked)
        if in_turn := findings.takes_more_batches(recorded, alone):
            alone = recording.replay(recorded, folder / "alone", asked, in_turn=True)
        floor = recording.replay(
            recorded, folder / "floor", asked, backwards=True, reseeded=findings.draws(recorded), in_turn=in_turn
        )
    except RunFailed as error:
        return findings.untold(f"as one process {error}", findings.between_ranks(recorded))
    verdict = findings.against_one(recorded, alone, floor)
    if not in_turn and findings.may_be_of_a_sum(verdict, recorded, alone):
        with contextlib.suppress(RunFailed):
            turn = recording.replay(recorded, folder / "turn", replace(asked, steps=1), in_turn=True)
            verdict = findings.unless_of_a_sum(verdict, recorded, turn)
    return verdict


def _two_scripts(
    recorded: recording.Recording, other: recording.Recording, folder: Path, asked: recording.Asked
) -> tuple[list[findings.Finding], str]:
    """What two scripts do differently, and why that can't be told, empty if it can.

    Sums in another order are no other model, and Adam makes whole steps of them where a gradient is nothing else, as
    that of a key's bias in attention. So where only gradients or weights differ, two replays of the other script show
    how far that goes.
    """
    found = findings.two_scripts(recorded, other)
    wrong = findings.wrong_of(found)
    if not wrong or not {each.kind for each in wrong} <= {"gradient", "step"}:
        return found, ""

    def replayed() -> list[tuple[float, float]]:
        alone, floor = (
            recording.replay(other, folder / name, asked, backwards=name == "floor") for name in ("alone", "floor")
        )
        return findings.rounding_of(alone, floor)[: other.steps]

    rounding, unknown = findings.measured(replayed)
    if unknown:
        if findings.wrong_of(findings.two_scripts(recorded, other, findings.NOT_FAR)):
            return found, ""
        rest = [each for each in found if each not in wrong]
        return rest, f"{wrong[0].says}, by less than {findings.FAR:.0%}; how far rounding goes is not known: {unknown}"
    judged = findings.two_scripts(recorded, other, rounding)
    most = max(map(max, rounding))
    if findings.wrong_of(judged):
        return judged, ""
    if findings.ABOVE_FLOOR * most > findings.TOO_HIGH:
        return judged, f"{wrong[0].says}, but rounding alone moves the other script by {most:.1%}"
    says = (
        f"differences of up to {findings.ABOVE_FLOOR * most:.1%} of what training changes can't be told from rounding"
    )
    return judged + findings.other_settings(recorded, other) + [findings.Finding("rounding", findings.NOTE, says)], ""


def _print(verdict: findings.Verdict) -> None:
    """Print the verdict and its causes, then a table of the steps."""
    print(
        f"{SAYS[verdict.answer]}: {verdict.reason}." if verdict.answer != findings.DIFFERENT else SAYS[verdict.answer]
    )
    for finding in verdict.findings:
        where = ", ".join(filter(None, [finding.step and f"step {finding.step}", finding.line]))
        print(f"- {finding.level}: {finding.says}{f' ({where})' if where else ''}")
        if finding.do:
            print(f"    {finding.do}")
    if not verdict.table:
        return
    lines = [
        [
            str(line["step"]),
            " + ".join(map(str, line["samples"])),
            *(_number(line[key], 5) for key in ("loss", "loss_alone", "gradient")),
            _number(line["rate"], 3),
            f"{line['distance']:.1e}",
            f"{line['floor']:.1e}",
        ]
        for line in verdict.table
    ]
    header = ["step", "samples", "loss", "on one", "gradient, times", "rate", "weights apart", "rounding alone"]
    print_table(header, lines)


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}g}"


if __name__ == "__main__":
    cli.run(main)
