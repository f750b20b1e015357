"""Which row to use, and how the others compare with it: by the table's places and ratios, without words."""

from lockstep import columns
from lockstep.report.ranking import BASELINE
from lockstep.report.reading import trusted
from lockstep.report.summary import Summary


def too_short(done: list[dict]) -> bool:
    """Whether no row trained for enough steps to tell which is faster."""
    return all(columns.too_short(row["steps"]) for row in done)


def fastest(done: list[dict]) -> dict:
    """The row with the shortest median time among ranked rows or, without any, in the closed division.

    Other rows with one device are left out if possible: they do the same as the baseline under another name, so that
    only chance would decide between them.
    """
    ranked = [row for row in done if row["place"]]
    several = [row for row in ranked if row["world_size"] > 1 or row["strategy"] == BASELINE]
    closed = [row for row in done if row["division"] == "closed"]
    return min(several or ranked or closed or done, key=lambda row: row["train_seconds"])


def recommended(done: list[dict]) -> dict:
    """The row to use: of the fastest row and those that tie with it, the first in the configuration's order.

    Configurations list the simplest strategies first, as the default one does.
    """
    best = fastest(done)
    first = [best, *tied(best, done)]
    return next(row for row in done if row in first)


def name(summary: Summary) -> str:
    """The name of the row to use; empty if none is recommended."""
    done = [row for row in summary.finished_rows if trusted(summary.runs[row["row"]])]
    return recommended(done)["row"] if done and not too_short(done) else ""


def tied(best: dict, done: list[dict]) -> list[dict]:
    """The other rows that share the first place with `best`, if each has more than one run."""
    several = [row for row in done if row["world_size"] > 1 or row["strategy"] == BASELINE]
    return [
        row
        for row in several
        if row is not best and row["place"] == best["place"] == 1 and min(row["repeats"], best["repeats"]) > 1
    ]


def undecided(best: dict, done: list[dict], summary: Summary) -> list[dict]:
    """The rows of which it is shown neither that they are faster than `best` nor that they are slower, fastest first.

    It is unknown of rows with a single run.
    """
    ratios = summary.ratios.get(best["row"], {})
    alike = [
        row
        for row in done
        if row is not best
        and ratios.get(row["row"], {}).get("shown") is False
        and min(row["repeats"], best["repeats"]) > 1
    ]
    return sorted(alike, key=lambda row: row["train_seconds"])


def is_faster(row: dict, other: dict, summary: Summary) -> bool:
    """Whether a row is shown to be faster than another one."""
    ratio = summary.ratios.get(row["row"], {}).get(other["row"])
    return bool(ratio and ratio["shown"] and ratio["value"] < 1)


def slowest_comparable(best: dict, done: list[dict], summary: Summary) -> dict:
    """The slowest row that can be compared with `best`, on equally many devices; `best` if there is none."""
    ratios = summary.ratios.get(best["row"], {})
    slower = [row for row in done if row["place"] and row["row"] in ratios and row["world_size"] == best["world_size"]]
    return max(slower, key=lambda row: row["train_seconds"], default=best)
