"""python -m benchmarks.others [--write]: how wrong `lockstep which` is, on training runs that others have published.

The rates of lockstep/forecast/sharded.py are found from llm-foundry's table. Four questions are asked of them: how
wrong they are on every second row if they are found from the others; on more GPUs than 64 if they are found from up to
64; on a size of model if they are found from the other sizes; and on the runs of other programs, which are never used
to find them. --write puts the answers, and the rates that all of the table gives, into docs/measurements/others.
"""

import argparse
import csv
import sys
from dataclasses import asdict, dataclass, fields, replace

import numpy as np
from scipy.optimize import least_squares

from benchmarks.common import between_marks, markdown
from lockstep.files import write_json
from lockstep.forecast import clusters, sharded
from lockstep.forecast.sharded import Rates, Run, Shape
from lockstep.paths import PROJECT
from lockstep.terminal import print_table

FOLDER = PROJECT / "docs" / "measurements" / "others"
TABLE, PROGRAMS = FOLDER / "llm-foundry.csv", FOLDER / "programs.csv"
RESULT, PAGE = FOLDER / "llm-foundry.json", FOLDER / "README.md"
MARKS = ("<!-- errors: begin -->", "<!-- errors: end -->")
PROGRAMS_MARKS = ("<!-- programs: begin -->", "<!-- programs: end -->")
START = Rates(0.8, 0.7, 0.5, 0.4, 300, 30, 1, 0.5, 5e-5)
# Of an error, as a logarithm: from here on it counts less than its square, since some rows are slow for reasons of
# their own, as with a memory that is nearly full.
ROBUST = 0.03
FEW = 64  # GPUs


@dataclass(frozen=True)
class Published:
    """A published run. speed: tokens/s of each GPU."""

    name: str
    shape: Shape
    run: Run
    speed: float
    line: dict  # all of its line in the table

    @property
    def kind(self) -> str:
        return self.run.cluster.rates

    def foretold(self, rates: Rates) -> float:
        return self.run.tokens / self.run.gpus / sharded.step_seconds(self.shape, self.run, rates)


def read(file) -> list[Published]:
    with file.open(encoding="utf-8") as stream:
        return [_published(line) for line in csv.DictReader(stream)]


def _published(line: dict) -> Published:
    shape = Shape(**{field.name: int(line[field.name]) for field in fields(Shape)})
    counts = ("gpus", "length", "micro_batch", "accumulation", "gathers")
    given = {name: int(line[name]) for name in counts} | {"recomputed": float(line["recomputed"])}
    cluster = clusters.cards()[line["card"]]
    if line.get("node_gpus"):
        cluster = replace(cluster, gpus_per_machine=int(line["node_gpus"]))
    if line.get("network_gbits"):
        cluster = replace(cluster, network=1e9 * float(line["network_gbits"]))
    return Published(line["model"], shape, Run(cluster, **given), float(line["tokens_per_second_per_gpu"]), line)


def fit(rows: list[Published]) -> Rates:
    """The rates with which these rows are foretold best: least squares of the errors' logarithms, large ones damped."""
    speeds = np.log([row.speed for row in rows])

    def errors(logarithms: np.ndarray) -> np.ndarray:
        rates = Rates(*np.exp(logarithms))
        return np.log([row.foretold(rates) for row in rows]) - speeds

    start = np.log(list(asdict(START).values()))
    found = least_squares(errors, start, loss="soft_l1", f_scale=ROBUST).x
    return Rates(*(float(f"{each:.3g}") for each in np.exp(found)))


def ratios(rows: list[Published], rates: Rates) -> np.ndarray:
    """Measured over foretold speed."""
    return np.array([row.speed / row.foretold(rates) for row in rows])


def halves(rows: list[Published]) -> np.ndarray:
    """Each row's ratio by the rates that the other half gives; the halves are every second row."""
    found = np.empty(len(rows))
    for first in (0, 1):
        found[first::2] = ratios(rows[first::2], fit(rows[1 - first :: 2]))
    return found


def by_size(rows: list[Published]) -> np.ndarray:
    """Each row's ratio by the rates that the other sizes of model give."""
    found = np.empty(len(rows))
    for size in dict.fromkeys(row.name for row in rows):
        own = np.array([row.name == size for row in rows])
        others = [row for row in rows if row.name != size]
        found[own] = ratios([row for row in rows if row.name == size], fit(others))
    return found


def errors(ratio: np.ndarray) -> dict[str, float]:
    """What is foretold, compared with what was measured: in per cent, without a sign."""
    wrong = 100 * np.abs(1 / ratio - 1)
    return {
        "rows": len(wrong),
        "mean": round(float(wrong.mean()), 1),
        "nine in ten": round(float(np.quantile(wrong, 0.9)), 1),
        "worst": round(float(wrong.max()), 1),
    }


def checked(rows: list[Published]) -> dict[str, tuple[int, int]]:
    """The smallest and the largest of what these rows have, by the names of lockstep/forecast/sharded.py."""
    facts = [sharded.facts(row.shape, row.run) for row in rows]
    return {name: (min(fact[name] for fact in facts), max(fact[name] for fact in facts)) for name in facts[0]}


def interval(unseen: np.ndarray, foreign: np.ndarray) -> tuple[float, float]:
    """Measured over foretold speed: that of nine in ten unseen rows, and of every run of another program."""
    low, high = np.quantile(unseen, [0.05, 0.95])
    return round(float(min(low, *foreign)), 3), round(float(max(high, *foreign)), 3)


def results() -> dict:
    rows, programs = read(TABLE), read(PROGRAMS)
    few, many = ([row for row in rows if (row.run.gpus <= FEW) == small] for small in (True, False))
    unseen, rates = halves(rows), fit(rows)
    kinds, cards = ("a100", "h100"), {row.run.cluster.card for row in rows}
    foreign = {kind: [row for row in programs if row.run.cluster.card in cards and row.kind == kind] for kind in kinds}
    others = [row for row in programs if row.run.cluster.card not in cards]
    return {
        "rates": asdict(rates),
        "intervals": {kind: interval(unseen, ratios(foreign[kind], rates)) for kind in kinds},
        "checked": {kind: checked([row for row in rows if row.kind == kind]) for kind in kinds},
        "errors": {
            "every second row, found from the others": errors(unseen),
            f"more than {FEW} GPUs, found from up to {FEW}": errors(ratios(many, fit(few))),
            "a size of model, found from the other sizes": errors(by_size(rows)),
            "other programs, A100": errors(ratios(foreign["a100"], rates)),
            "other programs, H100": errors(ratios(foreign["h100"], rates)),
            "another program, H200 (extrapolated)": errors(ratios(others, rates)),
        },
        "programs": [round(row.foretold(rates)) for row in programs],
    }


def error_lines(found: dict) -> list[list[str]]:
    return [[name, *(f"{each:g}" for each in numbers.values())] for name, numbers in found["errors"].items()]


def program_lines(found: dict) -> list[list[str]]:
    """One for each run of another program: what was measured, and what was foretold, in tokens/s of each GPU."""
    lines = []
    for row, speed in zip(read(PROGRAMS), found["programs"], strict=True):
        about = [row.line["program"], row.name, f"{row.run.gpus} {row.run.cluster.card}", str(row.run.length)]
        numbers = [f"{row.speed:,.0f}", f"{speed:,}", f"{row.speed / speed:.2f}"]
        lines.append([*about, row.line["compiled"], *numbers])
    return lines


ERRORS_HEADER = ["foretold", "rows", "error, mean, %", "nine in ten within, %", "worst, %"]
PROGRAMS_HEADER = ["program", "model", "GPUs", "tokens", "compiled", "measured", "foretold", "measured / foretold"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the results into docs/measurements/others too")
    arguments = parser.parse_args()
    found = results()
    print_table(ERRORS_HEADER, error_lines(found))
    print_table(PROGRAMS_HEADER, program_lines(found))
    for name in ("rates", "intervals", "checked"):
        print(f"{name}: {found[name]}")
    if arguments.write:
        write_json(RESULT, found)
        between_marks(PAGE, MARKS, markdown(ERRORS_HEADER, error_lines(found)))
        between_marks(PAGE, PROGRAMS_MARKS, markdown(PROGRAMS_HEADER, program_lines(found)))


if __name__ == "__main__":
    sys.exit(main())
