"""The line on conditions: on what, in which precision, how much work was measured, and how small a difference shows."""

from lockstep.config.hardware import busy_cores
from lockstep.report.ranking import BASELINE
from lockstep.report.reading import Run, good_runs
from lockstep.report.summary import Summary
from lockstep.report.words import Text, same, say, some

HARDLY = 0.5  # a smallest difference that runs can show is no figure to plan by, if it is as large as this


def conditions(summary: Summary) -> Text:
    """On what, in which precision, and how much work was measured."""
    done, statistics = summary.finished_rows, summary.statistics

    def each(key):
        return "/".join(dict.fromkeys(str(row[key]) for row in done))

    of_cores = baseline_cores(summary)
    idle = say("one_share", row=of_cores[0], n=of_cores[1], cores=of_cores[2]) if of_cores else same("")
    without = [row["row"] for row in done if _without_nccl(summary.runs[row["row"]])]
    shown = resolution(statistics["resolution"]) if statistics else same("")
    return say(
        "conditions",
        quick=say("quick") if summary.config["quick"] else same(""),
        idle=idle,
        without_nccl=say("without_nccl", rows=some(without)) if without else same(""),
        resolution=shown,
        blocks=_blocks(summary.blocks),
        machine=machine(summary.environment, done[0]["device"]),
        precision=each("precision"),
        batch=each("global_batch"),
        steps=each("steps"),
        repeats=span_of([len(runs) for runs in summary.runs.values()]),
        texts=summary.data["splits"]["train"]["texts"],
    )


def machine(environment: dict, device: str) -> Text:
    if device == "cuda":
        return same(f"{len(environment['gpus'])} x {environment['gpus'][0]}")
    return say("cpu_machine", cores=environment["cores"], cpu=environment["cpu"])


def devices_of(row: dict) -> Text:
    kind = "gpu" if row["device"] == "cuda" else "cpu"
    return say(f"{kind}_devices" if row["devices"] > 1 else f"{kind}_device", n=row["devices"])


def baseline_cores(summary: Summary) -> tuple[str, int, int] | None:
    """The baseline's row on a CPU, its number of cores, and the machine's, if these are more; otherwise None."""
    rows = [row["row"] for row in summary.finished_rows if row["strategy"] == BASELINE and row["device"] == "cpu"]
    if not rows:
        return None
    busy = busy_cores(good_runs(summary.runs[rows[0]])[0].asked["hardware"])
    cores = summary.environment["cores"]
    return (rows[0], busy, cores) if busy < cores else None


def resolution(difference: float) -> Text:
    """The smallest difference that the runs can show, in per cent with two significant digits."""
    if difference >= HARDLY:
        return say("resolution_none")
    return say("resolution", percent=f"{float(f'{100 * difference:.2g}'):g}")


def _without_nccl(runs: list[Run]) -> bool:
    """Whether a row ran on GPUs with a framework that was built without NCCL, as Horovod may be."""
    lives = [run.settings for run in good_runs(runs)]
    return any(live["device"] != "cpu" and live["options"].get("nccl_built") is False for live in lives)


def _blocks(decided: dict | None) -> Text:
    """Why no further block of runs followed, with `repeats: auto`."""
    kinds = {
        "one row is fastest": "blocks_one",
        "precise": "blocks_precise",
        "budget": "blocks_budget",
        "most blocks": "blocks_most",
    }
    if not decided or decided["why"] not in kinds:
        return same("")
    precision = say("blocks_unknown")
    if decided["width"] is not None:
        precision = say("blocks_known", width=f"{100 * decided['width']:.2g} %")
    return say(kinds[decided["why"]], known=precision)


def span_of(numbers: list[int]) -> Text:
    low, high = min(numbers), max(numbers)
    return same(str(low)) if low == high else say("span", low=low, high=high)


def of_images(summary: Summary) -> str:
    """The ending of the keys of sentences that have a variant for images."""
    return "_images" if summary.data.get("unit") == "images" else ""
