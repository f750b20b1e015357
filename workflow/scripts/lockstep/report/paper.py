"""What a paper needs: a methods paragraph, the table in LaTeX, a line per run, a citation, and all versions.

Everything is written from the records.
"""

import re
from collections import Counter
from functools import cache
from pathlib import Path
from urllib.parse import quote

import pandas as pd
import yaml

from lockstep import __version__, columns, paths, provenance
from lockstep.config import registry
from lockstep.config.configuration import PRECISE
from lockstep.config.hardware import device_count
from lockstep.config.machine import UNKNOWN_KIND
from lockstep.errors import BadInput, printable
from lockstep.files import read_object, write_csv, write_text
from lockstep.report import conditions, headline
from lockstep.report.reading import LONG, good_runs, records, succeeded, trusted
from lockstep.report.summary import Summary
from lockstep.report.words import MANY, Text, join, same, say, some
from lockstep.run.record import Tested

CITATION = paths.PROJECT / "CITATION.cff"
# Columns of runs.csv. Users' scripts read them, so add freely and never rename.
ABOUT_RUN = (
    *("row", "strategy", "division", "device", "world_size", "processes", "threads", "nodes", "precision"),
    *("global_batch", "steps", "repetition", "block", "session", "seed", "started", "status", "reason", "disturbed"),
    *("resumed", "wall_seconds"),
)
# Those of them that are numbers and no columns of the table.
NUMBERS = ("processes", "threads", "repetition", "block", "seed", "wall_seconds")
ESCAPED = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "–": "--",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "{": r"\textbraceleft{}",  # not \{, as BibTeX counts braces
    "}": r"\textbraceright{}",
    **{letter: f"\\{letter}" for letter in "&%$#_"},
}


def write(summary: Summary, cells: list[list], caption: Text, folder: Path) -> dict:
    """Write the files into the report's `folder`; return what the page shows of them.

    cells: the table of the page (report/page.py); caption: the conditions under which it was measured.
    """
    told = methods(summary)
    write_text(folder / paths.METHODS, f"{told.en}\n\n{told.zh}\n")
    write_text(folder / paths.LATEX, latex(cells, f"{_which_runs(summary)}{caption.en}. "))
    write_csv(folder / paths.RUNS_TABLE, [*ABOUT_RUN, *(column.key for column in columns.MEASURED)], run_lines(summary))
    cited = bibtex(summary)
    write_text(folder / paths.BIBTEX, cited)
    versions = installed(summary, folder.parent)
    write_text(folder / paths.INSTALLED, versions)
    keys = ("paper_methods", "paper_latex", "paper_runs", "paper_bibtex", "paper_installed")
    files = list(zip(paths.FOR_A_PAPER, keys, strict=True))
    return {"files": files, "methods": told, "bibtex": cited, "installed": versions}


def _which_runs(summary: Summary) -> str:
    """From which runs the table's figures come, for its caption."""
    first_look = "A first look, which is no measurement. " if summary.config.get("quick") else ""
    if not any(trusted(summary.runs[row["row"]]) for row in summary.finished_rows):
        return f"{first_look}Medians; every run was disturbed. "
    return f"{first_look}Medians of undisturbed runs. "


def methods(summary: Summary) -> Text:
    """The paragraph on how the results were made, as far as they exist."""
    done = summary.finished_rows
    if not done:
        return say("nothing")
    said = [_compared(summary), _trained(summary), _repeated(summary), say("methods_time"), *_left_out(summary)]
    if summary.blocks:
        said.append(say("methods_blocks", precise=f"{100 * PRECISE:g}", budget=f"{summary.config['budget']:g}"))
    said.append(say("methods_statistics", **_shown(summary)))
    said.append(headline.same_model(summary))
    if summary.config.get("quick"):
        said.append(say("methods_quick"))
    if summary.data["synthetic"]:
        said.append(say(f"methods_synthetic{conditions.of_images(summary)}"))
    return join(said, Text(" ", ""))


def _compared(summary: Summary) -> Text:
    """Which rows were compared, with which program, on which machine."""
    environment, first = summary.environment, summary.finished_rows[0]
    packages = environment["packages"]
    versions = [f"Python {environment['python']}"] if environment.get("python") else []
    names = ("torch", "transformers", *sorted({need for row in summary.finished_rows for need in _needs(row)}))
    versions += [f"{name} {packages[name]}" for name in dict.fromkeys(names) if packages.get(name)]
    versions += [f"{name} {environment[key]}" for name, key in NATIVE if environment.get(key)]
    kinds = []
    if kind := environment.get("virtual_machine"):
        kinds.append(say("methods_virtual", kind=say("kind_unknown") if kind == UNKNOWN_KIND else kind))
    if environment.get("governor"):
        kinds.append(say("methods_governor", governor=environment["governor"]))
    if environment.get("in_container"):
        digests = [f"{image} ({digest})" for image, of in environment["images"].items() for digest in of if digest]
        named = same(f" {', '.join(digests)}") if digests else same("")
        kinds.append(say("methods_container", kind=environment["in_container"], images=named))
    return say(
        "methods_compared",
        n=len(summary.finished_rows),
        rows=", ".join(row["row"] for row in summary.finished_rows),
        version=__version__,
        address=same(f" ({address()})") if address() else same(""),
        commit=_commits(summary),
        machine=conditions.machine(environment, first["device"]),
        kinds=join([same(""), *kinds], say("comma")),
        system=environment.get("system", "?"),
        kernel=environment.get("kernel", "?"),
        versions=join([same(version) for version in versions], say("comma")),
    )


NATIVE = (("CUDA", "cuda"), ("cuDNN", "cudnn"), ("NCCL", "nccl"), ("MPI", "mpi"))


def _needs(row: dict) -> list[str]:
    return [need.package for need in registry.needs(row["strategy"])]


def _commits(summary: Summary) -> Text:
    """The commits of the code that trained, and whether it had uncommitted changes."""
    places = [run.environment for run in summary.succeeded_runs]
    commits = list(dict.fromkeys((place.get("commit") or "?")[:12] for place in places))
    changed = any(place.get("changed") for place in places)
    return same(" / ".join(commits)) + (say("changed") if changed else same(""))


def _trained(summary: Summary) -> Text:
    """Which model was trained, on which data, with which recipe."""
    data, runs = summary.data, [good_runs(summary.runs[row["row"]])[0] for row in summary.finished_rows]
    trains, hardware = [run.asked["train"] for run in runs], [run.asked["hardware"] for run in runs]

    def each(values) -> Text:
        return _by_row([row["row"] for row in summary.finished_rows], [str(value) for value in values])

    splits = {name: data["splits"][name]["texts"] for name in ("train", "dev", "test")}
    return say(
        "methods_trained",
        model=say("methods_scratch") if data["model"] == "scratch" else data["model"],
        parameters=f"{data['parameters']:,}",
        weights=data["weights"][:16],
        source=say("methods_corpus") if data["synthetic"] and not conditions.of_images(summary) else data["source"],
        hash=data["hash"][:16],
        steps=each(run.steps for run in runs),
        batch=each(run.global_batch for run in runs),
        precision=each(run.precision for run in runs),
        optimizer=each(train.get("optimizer", "adamw") for train in trains),
        rate=each(train["learning_rate"] for train in trains),
        schedule=each(train.get("schedule", "linear") for train in trains),
        devices=each(device_count(place) for place in hardware),
        processes=each(place["processes"] for place in hardware),
        threads=each(place["threads"] for place in hardware),
        **splits,
    )


def _by_row(names: list[str], values: list[str]) -> Text:
    """The value that most rows have, and in brackets which rows have others: fp32 (ddp_amp: bf16)."""
    ((usual, _),) = Counter(values).most_common(1)
    others: dict[str, list[str]] = {}
    for name, value in zip(names, values, strict=True):
        if value != usual:
            others.setdefault(value, []).append(name)
    english = "; ".join(f"{', '.join(rows)}: {value}" for value, rows in others.items())
    chinese = "；".join(f"{'、'.join(rows)}：{value}" for value, rows in others.items())
    return Text(f"{usual} ({english})", f"{usual}（{chinese}）") if others else same(usual)


def _repeated(summary: Summary) -> Text:
    runs = summary.succeeded_runs
    started = sorted(run.started[:10] for run in runs)
    counts = sorted(len(succeeded(several)) for several in summary.runs.values() if succeeded(several))
    low, high = counts[0], counts[-1]
    return say(
        "methods_repeated",
        runs=len(runs),
        repeats=same(str(low)) if low == high else say("span", low=low, high=high),
        seed=summary.config["train"]["seed"],
        dates=same(started[0]) if started[0] == started[-1] else say("span", low=started[0], high=started[-1]),
    )


def _left_out(summary: Summary) -> list[Text]:
    """Which runs are in no figure, and why; or that no run is left out."""
    said = []
    names = [row["row"] for row in summary.rows]
    every = [(name, run) for name in names for run in summary.runs[name]]
    finished = [(name, run) for name in names for run in succeeded(summary.runs[name])]
    disturbed = [f"{name} #{run.repeat}" for name, run in finished if _disturbed(run)]
    kept = [row["row"] for row in summary.finished_rows if all(map(_disturbed, good_runs(summary.runs[row["row"]])))]
    again = sum(len(made.disturbed_before) for made in records([run for _, run in every]))
    if disturbed:
        said.append(say("methods_disturbed", n=len(disturbed), all=len(summary.succeeded_runs), which=_some(disturbed)))
    if kept:
        said.append(say("methods_disturbed_kept", rows=", ".join(kept)))
    if again:
        said.append(say("methods_again", n=again))
    for status in ("failed", "stale", "unavailable", "skipped"):
        if missing := [f"{name} #{run.repeat}" for name, run in every if run.status == status]:
            said.append(say("methods_missing", status=say(f"status_{status}"), which=_some(missing)))
    resumed = [f"{name} #{run.repeat}" for name, run in finished if run.resumed]
    if resumed:
        said.append(say("methods_resumed", which=_some(resumed)))
    return said or [say("methods_nothing_left_out")]


def _disturbed(run: Tested) -> list[str]:
    return run.watch.disturbed


def _some(names: list[str]) -> Text:
    return some(names, MANY)


def _shown(summary: Summary) -> dict[str, Text]:
    statistics = summary.statistics
    known = statistics and statistics["resolution"] is not None
    chance = say("chance_blocks" if summary.blocks else "chance")
    return {"resolution": conditions.resolution(statistics["resolution"]) if known else same(""), "chance": chance}


def run_lines(summary: Summary) -> list[list]:
    """A line for each requested run, in the order of rows and repetitions."""
    lines = []
    for row in summary.rows:
        for run in summary.runs[row["row"]]:
            ok = run.status == "ok"
            has = next(map(vars, records([run])), {})  # without steps and seconds, if it failed
            asked = has.get("asked", {})
            hardware = asked.get("hardware", {})
            about = {name: has.get(name, row[name]) for name in ("strategy", "division", "world_size", "precision")}
            about |= {name: has.get(name) for name in ("global_batch", "steps", "session", "started", "wall_seconds")}
            about |= {name: hardware.get(name) for name in ("device", "processes", "threads", "nodes")}
            about |= {
                "row": row["row"],
                "repetition": run.repeat,
                "block": run.repeat,  # a block is one repetition of all rows
                "seed": asked.get("train", {}).get("seed"),
                "status": run.status,
                "reason": run.reason,
                "disturbed": "; ".join(_disturbed(run)) if ok else None,
                "resumed": " ".join(map(str, has.get("resumed", ()))),
            }
            values = [about[name] for name in ABOUT_RUN]
            lines.append([*values, *(column.measure(run) if ok else None for column in columns.MEASURED)])
    return lines


def latex(cells: list[list], caption: str) -> str:
    """The table's main columns in the style of booktabs; all texts are escaped for LaTeX."""
    shown = [[cell for cell in line if cell.deciding] for line in cells]
    if not shown:
        return "% no row yet\n"
    table = pd.DataFrame(
        [[_latex_cell(cell) for cell in line] for line in shown],
        columns=[escaped(cell.heading.en) for cell in shown[0]],
    )
    alignment = "".join("r" if cell.number else "l" for cell in shown[0])
    tabular = table.style.hide(axis="index").to_latex(column_format=alignment, hrules=True)
    ranges = any(cell.more for line in shown for cell in line)
    told = "In brackets: the range or quartiles of times, 95 % intervals of speed-ups. " if ranges else ""
    return "\n".join(
        [
            f"% Written by Lockstep {__version__}.",
            r"% Needs \usepackage{booktabs}, \usepackage{graphicx} and \usepackage[T1]{fontenc}.",
            r"\begin{table}",
            r"\centering",
            f"\\caption{{{escaped(caption + told)}}}",
            r"\label{tab:lockstep}",
            r"% Not wider than the text.",
            r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
            f"{tabular.rstrip()}}}",
            r"\end{table}",
            "",
        ]
    )


def _latex_cell(cell) -> str:
    return escaped(cell.text.en or "–") + (f" [{escaped(cell.more)}]" if cell.more else "")


def escaped(text: str) -> str:
    """A text that LaTeX prints literally, on one line, without commands or comments."""
    return "".join(ESCAPED.get(letter, letter) for letter in printable(text))


@cache
def _citation() -> dict:
    return yaml.safe_load(CITATION.read_text(encoding="utf-8"))


@cache
def address() -> str | None:
    """Lockstep's address: that in CITATION.cff, or git's origin without user names and passwords; None without."""
    if named := _citation().get("repository-code") or _citation().get("url"):
        return named
    url = re.fullmatch(r"(https?://|ssh://|)(?:[^@/]*@)?([\w.-]+\.\w+[:/][^\s?#]*)", provenance.origin())
    if url is None:
        return None  # a folder of this machine is of no use to readers
    return "https://" + url[2].replace(":", "/", 1) if url[1] != "http://" else url[1] + url[2]


def bibtex(summary: Summary) -> str:
    """A BibTeX entry for Lockstep, from CITATION.cff, with the version and the results' commit."""
    cited = _citation()
    commits = [_commits(summary).en] if summary.succeeded_runs else []
    fields = {
        "title": f"{{{escaped(cited['title'])}}}",
        "author": " and ".join(map(_author, cited["authors"])),
        "version": escaped(__version__),
        "year": str(cited["date-released"])[:4] if "date-released" in cited else None,
        "url": quote(address() or "", safe=":/?#[]@!$&'()*+,;=%~"),  # LaTeX's \url prints letters as they are
        "note": escaped("; ".join([f"Version {__version__}", *(f"commit {commit}" for commit in commits)])),
    }
    lines = [f"  {name} = {{{value}}}," for name, value in fields.items() if value]
    return "\n".join(["@misc{lockstep,", *lines, "}", ""])


def _author(author: dict) -> str:
    """An author of CITATION.cff as BibTeX has it: "family, given", or an entity, undivided, in braces."""
    if "name" in author:
        return f"{{{escaped(author['name'])}}}"
    return ", ".join(escaped(author[part]) for part in ("family-names", "given-names") if part in author)


def installed(summary: Summary, results: Path) -> str:
    """Machine, system, compilers, PyTorch's build and all packages: once per environment, with its rows."""
    rows: dict[str, list[str]] = {}
    for row in summary.finished_rows:
        run = good_runs(summary.runs[row["row"]])[0]
        file = results / paths.RUNS / paths.run_name(row["row"], run.world_size, run.repeat) / paths.ENVIRONMENT
        try:
            environment = read_object(file, ())
        except (BadInput, OSError):
            environment = run.environment
        rows.setdefault(_environment_text(environment), []).append(row["row"])
    return "\n".join(f"# {', '.join(names)}\n\n{text}" for text, names in rows.items())


def _environment_text(environment: dict) -> str:
    # A row's own variables are among its settings; here they would make a separate environment of each row.
    left_out = (*LONG, "packages", "variables", "config_hash", "gpu_details")
    lines = [f"{name}: {_plain(value)}" for name, value in environment.items() if name not in left_out]
    lines += [f"gpu: {_plain(gpu)}" for gpu in environment.get("gpu_details", ())]
    lines += ["", environment.get("torch_config") or "PyTorch's build: not recorded", ""]
    packages = environment.get("installed") or environment["packages"]
    lines += [f"{name}=={version}" for name, version in packages.items() if version]
    return "\n".join(lines) + "\n"


def _plain(value) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(inner)}" for name, inner in value.items())
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
