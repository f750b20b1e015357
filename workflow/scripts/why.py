"""Why is a row as fast as it is? Where its steps go, and from which batch on it beats one device.

    lockstep why ddp

It reads a finished benchmark and runs nothing. What was measured and what is foretold from it are told apart; each
foretold number has a 95 % interval, from resampled steps.
"""

import argparse
from dataclasses import asdict
from pathlib import Path

from lockstep import cli, frames
from lockstep.config.schema import hint
from lockstep.errors import BadInput
from lockstep.files import write_json
from lockstep.forecast import step
from lockstep.forecast.step import Estimate, Line
from lockstep.report.reading import good_runs
from lockstep.report.reasons import of_step
from lockstep.report.words import three
from lockstep.terminal import print_table

TIMES = (1 / 4, 1 / 2, 1, 2, 4, 16)  # of the global batch
COLUMNS = ["global batch", "{against}, ms", "{row}, ms", "times as fast", "95 % interval", "how it is known"]


def main() -> None:
    parser = cli.parser(__doc__, configured=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("row", help="a row of the table")
    parser.add_argument(
        "--against", default="single", metavar="ROW", help="the row to compare it with (default: single)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything into a new file")
    arguments = parser.parse_args()
    cli.must_be_new(arguments.json, "--json", "file")
    results = frames.load(arguments.results)
    row, against = (_row(results, name) for name in (arguments.row, arguments.against))
    if arguments.row == arguments.against:
        raise BadInput(f"--against {arguments.against}: it is the row itself. Name another one.")
    if row["global_batch"] != against["global_batch"] or not _plans(results, row) & _plans(results, against):
        raise BadInput(f"--against {arguments.against}: it has another plan, so its steps are not comparable.")
    print(_first(results, row, against))
    _tell_parts(results, row)
    try:
        lines = [step.line(results, name) for name in (row["row"], against["row"])]
    except BadInput as error:
        print(f"From which batch on it is the faster one can't be told: {error}")
        return
    print(_crossing(row, against, *lines))
    table = [
        _measured(results, row, against, *lines) if times == 1 else _at(row, times, *lines)
        for times in TIMES
        if row["global_batch"] * times >= max(_smallest(results, row), _smallest(results, against))
    ]
    header = [name.format(row=row["row"], against=against["row"]) for name in COLUMNS]
    print_table(header, [_cells(each) for each in table])
    print(
        "Foretold numbers come from a straight line through this benchmark's steps. Whether a larger batch fits, and"
        " whether it still learns as well, is another question."
    )
    if arguments.json:
        write_json(arguments.json, {"row": row["row"], "against": against["row"], "batches": table})


def _row(results: frames.Results, name: str) -> dict:
    rows = {row["row"]: row for row in results.report["rows"]}
    if name not in rows:
        raise BadInput(f"{name}: no such row in {results.folder}. There are: {', '.join(rows)}.{hint(name, rows)}")
    if rows[name]["status"] != "ok":
        raise BadInput(f"{name}: {rows[name]['reason'] or rows[name]['status']}. Run it first: lockstep row {name}")
    return rows[name]


def _plans(results: frames.Results, row: dict) -> set[str]:
    """The plans that a row's runs have trained: one, or with vary_seed one each."""
    return {run.asked["plan"] for run in good_runs(results.report["runs"][row["row"]])}


def _smallest(results: frames.Results, row: dict) -> int:
    """The smallest global batch of a row: a sample for each device and micro-batch."""
    asked = good_runs(results.report["runs"][row["row"]])[0].asked
    return row["devices"] * asked["train"]["accumulation"]


def _first(results: frames.Results, row: dict, against: dict) -> str:
    said = (
        f"{row['row']} takes {row['step_ms']:.3g} ms a step on {_devices(row)}, {against['row']}"
        f" {against['step_ms']:.3g} on {_devices(against)}."
    )
    ratio = results.report["ratios"].get(row["row"], {}).get(against["row"])
    if not ratio:
        return said
    between = f" ({1 / ratio['high']:.2f} to {1 / ratio['low']:.2f})" if ratio["kind"] else ", without an interval"
    return f"{said} Measured over the whole training, it is {1 / ratio['value']:.2f} times as fast{between}."


def _devices(row: dict) -> str:
    kind = "GPU" if row["device"] == "cuda" else "device"
    return f"{row['devices']} {kind}{'s' if row['devices'] > 1 else ''}"


def _tell_parts(results: frames.Results, row: dict) -> None:
    profile = results.report["profiles"].get(row["row"])
    if not profile:
        print(f"Where a step goes is not known: it has no profile. Make one: lockstep bench profile_{row['row']}")
        return
    scaled = of_step(profile, row["step_ms"] / 1000)
    parts = [
        [name, f"{1000 * part:.2f}", f"{100 * part / scaled['step_seconds']:.0f}"]
        for name, part in scaled["seconds"].items()
    ]
    print_table(["where a step goes", "ms", "%"], parts)
    waits = [scaled["seconds"]["communication"], *filter(None, [scaled["exposed_by_difference"]])]
    if row["devices"] > 1 and max(waits) > 0:
        least = 1000 * (scaled["step_seconds"] - max(waits))
        ways = " to ".join(dict.fromkeys(f"{1000 * seconds:.3g}" for seconds in sorted(waits)))
        print(
            f"It waits {ways} ms for communication{', by two ways of measuring it' if len(waits) > 1 else ''}."
            f" Without any, a step would take {least:.3g} ms at best: more can't be won by sending less, as"
            " compression (hook), local_sgd and diloco do."
        )


def _crossing(row: dict, against: dict, ours: Line, theirs: Line) -> str:
    said = (
        f"A step of {row['row']} costs {1000 * ours.fixed:.3g} ms whatever its batch and {1e6 * ours.each:.3g} µs a"
        f" token, of {against['row']} {1000 * theirs.fixed:.3g} ms and {1e6 * theirs.each:.3g} µs (from {ours.steps}"
        f" steps of {ours.tokens[0]:,} to {ours.tokens[1]:,} tokens)."
    )
    crossing = step.break_even(ours, theirs)
    if crossing is None:
        end = step.break_even(theirs, ours)
        if end is None or end.value == 0:
            return f"{said} By these lines it is faster at no batch."
        return f"{said} It is the faster one up to {_tokens(end)}."
    if crossing.high == 0:
        return f"{said} By these lines it is faster at every batch."
    return f"{said} It is the faster one from {_tokens(crossing, ' on')}."


def _tokens(crossing: Estimate, on: str = "") -> str:
    high = "without end" if crossing.high == float("inf") else f"{crossing.high:,.0f}"
    return f"{crossing.value:,.0f} tokens a step{on} ({crossing.low:,.0f} to {high})"


def _at(row: dict, times: float, ours: Line, theirs: Line) -> dict:
    """What is foretold for a global batch that is so many times the measured one, at the mean width."""
    tokens = times * ours.mean
    inside = ours.tokens[0] <= tokens <= ours.tokens[1]
    return {
        "global_batch": round(times * row["global_batch"]),
        "tokens": tokens,
        "against": asdict(theirs.at(tokens)),
        "row": asdict(ours.at(tokens)),
        "times_as_fast": asdict(step.times_as_fast(ours, theirs, tokens)),
        "known": "by steps of that size" if inside else "extrapolated",
    }


def _measured(results: frames.Results, row: dict, against: dict, ours: Line, theirs: Line) -> dict:
    """What the report says of the batch that was trained, in the form of `_at`; a step's time has no interval."""
    at = _at(row, 1, ours, theirs) | {"known": "measured"}
    for name, of in (("row", row), ("against", against)):
        at[name] = {"value": of["step_ms"] / 1000, "low": None, "high": None}
    if ratio := results.report["ratios"].get(row["row"], {}).get(against["row"]):
        low, high = (1 / ratio["high"], 1 / ratio["low"]) if ratio["kind"] else (None, None)
        at["times_as_fast"] = {"value": 1 / ratio["value"], "low": low, "high": high}
    return at


def _cells(at: dict) -> list[str]:
    ratio = Estimate(**at["times_as_fast"])
    seconds = [three(1000 * at[name]["value"]) for name in ("against", "row")]
    return [
        str(at["global_batch"]),
        *seconds,
        f"{ratio.value:.2f}",
        "" if ratio.low is None else f"{ratio.low:.2f} to {ratio.high:.2f}",
        at["known"],
    ]


if __name__ == "__main__":
    cli.run(main)
