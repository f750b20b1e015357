"""What was foretold of rows and sealed before they ran, beside what was measured."""

from pathlib import Path

from lockstep import paths
from lockstep.config.configuration import Config
from lockstep.errors import BadInput
from lockstep.files import hash_file
from lockstep.run import seals


def against(config: Config, rows: list[dict], results: Path, damaged: list[str]) -> dict | None:
    """The sealed forecasts of a results folder, with what was measured; None if there are none.

    rows: the lines of the table. Has `time` and `sha256` of the seal; `rows`, those with a forecast: seconds of a step
    foretold and measured, the error as a share of what was measured, and whether it is inside the interval (None
    without one); `not_compared`, why a row has no comparison, by its name; `broken`, where the seal does not hold, and
    why. An error of reading is added to `damaged`.
    """
    try:
        sealed = seals.read(results)
        broken = seals.broken(results)
    except BadInput as error:
        damaged.append(str(error))
        return None
    if not sealed:
        return None
    lines, compared, left_out = {line["row"]: line for line in rows}, [], {}
    spoilt = {where for where, _ in broken}  # rows, or the file, and so all of them
    for name, forecast in sealed["rows"].items():
        why, line = "", lines.get(name)
        if {name, str(paths.foretold_file(results))} & spoilt:
            why = "its seal does not hold"
        elif not forecast["seconds"]:
            why = "; ".join(forecast["why"])
        elif not line or line["step_ms"] is None:
            why = "it was not measured"
        elif seals.settings_hash(config.rows[name]) != forecast["settings"]:
            why = "it was foretold with other settings"
        if why:
            left_out[name] = why
        else:
            compared.append(_line(name, forecast, line["step_ms"] / 1000))
    ends = [line["inside"] for line in compared if line["inside"] is not None]
    return {
        "time": sealed["time"],
        "sha256": hash_file(paths.foretold_file(results)),
        "rows": compared,
        "with_interval": len(ends),
        "inside": sum(ends),
        "mean_error": sum(abs(line["error"]) for line in compared) / len(compared) if compared else None,
        "not_compared": left_out,
        "broken": broken,
    }


def _line(name: str, forecast: dict, measured: float) -> dict:
    seconds = forecast["seconds"]
    inside = None if seconds["low"] is None else seconds["low"] <= measured <= seconds["high"]
    line = {"row": name, "known": forecast["known"], "why": forecast["why"], "foretold": seconds}
    return line | {"measured": measured, "error": seconds["value"] / measured - 1, "inside": inside}
