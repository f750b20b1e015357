"""The report: what every row did, gathered from the runs' records; as CSV, JSON, Markdown, and one HTML page.

It can be made at any moment: rows that have not run, or failed, keep their line, with the reason.
"""

from pathlib import Path

import jinja2
import pandas as pd

from lockstep import charts, parity, record
from lockstep.config import Config, Row
from lockstep.errors import BadInput
from lockstep.files import read_json, write_json, write_text

TEMPLATES = Path(__file__).parents[2] / "report"
BASELINE = "single"
# summary.csv: users script against these names, so add freely and rename never.
COLUMNS = [
    "row",
    "strategy",
    "division",
    "device",
    "world_size",
    "nodes",
    "precision",
    "global_batch",
    "steps",
    "repeats",
    "train_seconds",
    "step_ms",
    "samples_per_second",
    "tokens_per_second",
    "startup_seconds",
    "speedup",
    "efficiency",
    "accuracy",
    "macro_f1",
    "final_loss",
    "peak_memory_mb",
    "proof",
    "status",
    "reason",
]
# The table that people read: column, heading, digits after the point.
SHOWN = (
    ("row", "row", None),
    ("world_size", "devices", 0),
    ("precision", "precision", None),
    ("global_batch", "global batch", 0),
    ("steps", "steps", 0),
    ("train_seconds", "train s", 2),
    ("samples_per_second", "samples/s", 0),
    ("speedup", "speed-up", 2),
    ("efficiency", "efficiency", 2),
    ("accuracy", "accuracy", 4),
    ("macro_f1", "macro-F1", 4),
    ("peak_memory_mb", "peak MiB", 0),
    ("proof", "same model?", None),
    ("status", "status", None),
)


def gather(config: Config, results: Path) -> dict:
    """All that the report says, as plain values: `rows` (one a row, in the table's columns), `runs`, `headline`, ..."""
    data_file = results / "data" / "data.json"
    if not data_file.is_file():
        raise BadInput(f"{data_file} does not exist. Run workflow/scripts/prepare.py first.")
    runs = {row.name: [_run(row, repeat, results) for repeat in config.repetitions] for row in config.rows.values()}
    verdicts = {row.name: parity.read(config, row, results) for row in config.rows.values()}
    rows = [_line(row, runs[row.name], verdicts[row.name]) for row in config.rows.values()]
    _compare(rows, config)
    environments = [run["environment"] for several in runs.values() for run in several if run.get("environment")]
    summary = {
        "rows": rows,
        "runs": runs,
        "verdicts": verdicts,
        "data": read_json(data_file),
        "plans": {
            file.stem: _without_ids(read_json(file)) for file in sorted((results / "data" / "plan").glob("*.json"))
        },
        "environment": environments[0] if environments else None,
        "manifest": read_json(results / "manifest.json") if (results / "manifest.json").is_file() else None,
        "config": config.source,
    }
    return {"headline": headline(summary)} | summary


def _run(row: Row, repeat: int, results: Path) -> dict:
    folder = results / row.folder(repeat)
    missing = {"status": "skipped", "reason": "not run yet"}
    if row.unavailable:
        missing = {"status": "unavailable", "reason": row.unavailable}
    found = {"log_end": []} | (record.read_run(folder) or missing)
    if found["status"] == "ok":
        tested = folder / "test" / "report.json"
        if not tested.is_file():
            return found | {"status": "skipped", "reason": "trained, but not converted and tested yet"}
        found["test"] = read_json(tested)
        found["test"]["text"] = (folder / "test" / "report.txt").read_text(encoding="utf-8")
        found["environment"] = read_json(folder / "env.json")
    elif found["status"] == "failed" and Path(found["log"]).is_file():
        found["log_end"] = Path(found["log"]).read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
    return found


def _line(row: Row, runs: list[dict], verdict: dict | None) -> dict:
    """One line of summary.csv: medians over the repetitions that succeeded."""
    good = [run for run in runs if run["status"] == "ok"]
    bad = [run for run in runs if run["status"] != "ok"]
    line = dict.fromkeys(COLUMNS) | {
        "row": row.name,
        "strategy": row.strategy,
        "division": row.division,
        "device": row.hardware.device,
        "world_size": row.hardware.processes,
        "nodes": row.hardware.nodes,
        "precision": row.precision,
        "global_batch": row.train.global_batch,
        "repeats": len(good),
        "proof": verdict["proof"] if verdict else "not-run",
        "status": bad[0]["status"] if bad else "ok",
        "reason": "; ".join(dict.fromkeys(run["reason"] for run in bad)),
    }
    if not good:
        return line
    measured = pd.DataFrame(
        {
            "train_seconds": run["clock"]["train_seconds"],
            "step_ms": run["clock"]["step_seconds_median"] * 1000,
            "samples_per_second": run["throughput"]["samples_per_second"],
            "tokens_per_second": run["throughput"]["tokens_per_second"],
            "startup_seconds": run["clock"]["first_step_seconds"],
            "accuracy": run["test"]["accuracy"],
            "macro_f1": run["test"]["macro_f1"],
            "final_loss": run["losses"][-1],
            "peak_memory_mb": run["memory"]["peak_mb"],
        }
        for run in good
    )
    return line | {"steps": good[0]["steps"]} | measured.median().to_dict()


def _compare(rows: list[dict], config: Config) -> None:
    """Fill in speed-up over the baseline, for rows that do the baseline's work on the same kind of device.

    A row that was found to train another model is not compared.
    """
    base = next((row for row in rows if row["strategy"] == BASELINE and row["train_seconds"]), None)
    for row in rows:
        same = base and row["train_seconds"] and row["device"] == base["device"] and row["proof"] != "unequal"
        if same and config.rows[row["row"]].train.plan_name == config.rows[base["row"]].train.plan_name:
            row["speedup"] = base["train_seconds"] / row["train_seconds"]
            row["efficiency"] = row["speedup"] * base["world_size"] / row["world_size"]


def headline(summary: dict) -> list[str]:
    """The first lines of page, Markdown and terminal: verdict, ratio, same model?, conditions, what not to conclude."""
    rows = summary["rows"]
    done = [row for row in rows if row["train_seconds"]]
    if not done:
        return ["Nothing to compare yet: no row has a result."]
    base = next((row for row in done if row["strategy"] == BASELINE and row["speedup"]), None)
    # A row that has one device like the baseline does the same under another name; between them only chance decides.
    rivals = [row for row in done if row["speedup"] and (row is base or row["world_size"] > 1)]
    fastest = min(
        rivals or [row for row in done if row["proof"] != "unequal"] or done, key=lambda row: row["train_seconds"]
    )
    lines = [f"Fastest here: {fastest['row']}, {fastest['train_seconds']:.3g} s of training."]
    if base and fastest is not base:
        lines.append(
            f"{fastest['row']} takes {1 / fastest['speedup']:.2f} of {base['row']}'s time"
            f" ({fastest['train_seconds']:.3g} s against {base['train_seconds']:.3g} s; n = {fastest['repeats']})."
        )
    if len(done) < len(rows):
        lines.append(f"Partial: {len(done)} of {len(rows)} rows have a result.")
    lines.append(_same_model(rows))
    lines.append(_conditions(fastest, summary))
    warnings = _warnings(done, summary)
    return [*lines, "Mind: " + "; ".join(warnings) + "."] if warnings else lines


def _same_model(rows: list[dict]) -> str:
    kinds = {
        "equal": "equal",
        "within-tolerance": "within tolerance",
        "unequal": "NOT equal",
        "not-run": "not proven yet",
    }
    found = {text: [row["row"] for row in rows if row["proof"] == kind] for kind, text in kinds.items()}
    said = [f"{len(names)} {text} ({', '.join(names)})" for text, names in found.items() if names]
    return f"Same model as single, step by step? {'; '.join(said)}."


def _conditions(row: dict, summary: dict) -> str:
    machine = summary["environment"]
    devices = (
        f"{len(machine['gpus'])} x {machine['gpus'][0]}"
        if row["device"] == "cuda"
        else f"{machine['cores']} CPU cores ({machine['cpu']})"
    )
    batches, steps = ({str(line[key]) for line in summary["rows"] if line[key]} for key in ("global_batch", "steps"))
    return (
        f"On {devices}; global batch {' or '.join(sorted(batches))}, {' or '.join(sorted(steps))} steps;"
        f" {summary['data']['splits']['train']['texts']} training texts."
    )


def _warnings(done: list[dict], summary: dict) -> list[str]:
    warnings = []
    if summary["data"]["synthetic"]:
        warnings.append("the data is synthetic and says nothing about language")
    if all(row["device"] == "cpu" for row in done):
        warnings.append("CPU only: it shows that all works and how it scales on a CPU, not how GPUs would rank")
    if min(row["repeats"] for row in done) < 3:
        warnings.append("fewer than 3 repetitions, so small differences may be chance")
    if len({row["precision"] for row in done}) > 1:
        warnings.append("rows differ in precision, see the table")
    if any(row["division"] == "open" for row in done):
        warnings.append("rows marked open do other work than the rest")
    return warnings


def _without_ids(plan: dict) -> dict:
    return plan | {"dropped": len(plan["dropped"])}


def shown(rows: list[dict]) -> tuple[list[str], list[list[str]]]:
    """The table for people: headings, and lines of strings."""
    return [heading for _, heading, _ in SHOWN], [
        [_number(row[key], digits) for key, _, digits in SHOWN] for row in rows
    ]


def _number(value, digits: int | None) -> str:
    if value is None:
        return ""
    return str(value) if digits is None else f"{value:.{digits}f}"


def notes(summary: dict) -> list[tuple[str, str]]:
    """What a reader must know about a row: (row, note), each once."""
    said = [(name, note) for name, runs in summary["runs"].items() for run in runs for note in run.get("notes", ())]
    return list(dict.fromkeys(said))


def write(summary: dict, folder: Path, predictions: Path) -> None:
    """Write report.html, report.md, summary.csv, summary.json and plots/ into `folder`."""
    header, lines = shown(summary["rows"])
    pictures = charts.draw(summary, folder / "plots")
    write_text(folder / "summary.csv", pd.DataFrame(summary["rows"], columns=COLUMNS).to_csv(index=False))
    write_json(folder / "summary.json", summary)
    texts = (
        pd.read_csv(predictions, keep_default_na=False, dtype=str, encoding="utf-8-sig")
        if predictions.is_file()
        else None
    )
    context = summary | {
        "header": header,
        "lines": lines,
        "numeric": [digits is not None for _, _, digits in SHOWN],
        "notes": notes(summary),
        "charts": pictures,
        "predictions": texts,
    }
    for name, escape in (("report.md", False), ("report.html", True)):
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(TEMPLATES),
            autoescape=escape,  # the dataset's texts are anybody's
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters["cell"] = _markdown_cell
        write_text(folder / name, environment.get_template(f"{name}.j2").render(context))


def _markdown_cell(value) -> str:
    """A text that can't break out of a Markdown table's cell, nor be read as Markdown or HTML."""
    text = str(value).replace("&", "&amp;").replace("<", "&lt;").replace("\n", " ")
    for mark in "\\|`*_[]#":
        text = text.replace(mark, f"\\{mark}")
    return text
