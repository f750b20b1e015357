"""The report's pictures: functions from the summary to a figure, its title, its note and the numbers in it.

matplotlib draws them as SVG: 10 to 60 kB each, with text as text, the same bytes each time, and without a script.
Vega-Lite or Plotly would add 1 to 5 MB of JavaScript to a page that is to be one small file.
"""

import itertools
import math
import sys
from dataclasses import dataclass, field

import matplotlib
import numpy as np

from lockstep.config import registry
from lockstep.config.hardware import device_count
from lockstep.config.qualities import QUALITIES
from lockstep.report import choice, reasons
from lockstep.report.ranking import BASELINE
from lockstep.report.reading import Run, good_runs, succeeded, trusted
from lockstep.report.summary import Summary
from lockstep.report.words import Text, join, on_test_split, same, say, some, three
from lockstep.run.record import Tested

if "ipykernel" not in sys.modules:  # a notebook has a backend of its own
    matplotlib.use("Agg")
from matplotlib import pyplot as plt

# Colours with a contrast of at least 3:1 on white and on the page's dark background (Okabe & Ito 2008, some darkened).
COLOURS = ("#0072B2", "#D55E00", "#008060", "#B0527F", "#7A6A00", "#777777")
GAP = "\u00a0"  # the space beside a bar, where a browser drops a plain one
INSIDE = {"ha": "center", "va": "center", "fontsize": 8, "color": "white"}
# Inches: a phone shows a picture in its full width, and a desktop three side by side, with text in the page's size.
WIDTH, HEIGHT, LINE = 4.7, 3.4, 0.3
LEGEND = {"loc": "outside lower center", "frameon": False, "fontsize": 9, "columnspacing": 1.2, "handlelength": 1.6}
# Rows within this many times the shortest time get a panel of their own, if others take twice as long.
CLOSE = 1.3
AS_LITTLE = 1.03  # memory that is higher by this factor differs by no more than two runs of a row do
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MARKERS = "osD^v<>pPX*h"
PHASES = ("forward", "backward", "optimizer", "data", "communication", "idle")
MEMORY = ("memory_before_mb", "peak_memory_mb", "proportional_memory_mb")
SETUP = ("imports", "process_group", "model", "wrap", "data", "check", "warm_up")


@dataclass
class Drawing:
    """A figure with its title, note and table on the page."""

    figure: plt.Figure
    title: Text
    note: Text
    header: list[Text]
    table: list[list[str]]
    tips: dict[str, str] = field(default_factory=dict)  # the tooltips of marks, by their gid


def drawings(summary: Summary):
    """(name, function) of every picture for which there are data; the function draws it."""
    done = summary.finished_rows
    profiled = [row for row in done if summary.profiles.get(row["row"])]
    if done:
        yield "train_seconds", lambda: times(done, summary)
    if profiled:
        yield "step_parts", lambda: step_parts(profiled, summary)
    if done:
        yield "losses", lambda: losses(done, summary)
    if of_terms := [row for row in done if median_run(row, summary).terms]:
        yield "terms", lambda: terms(of_terms, summary)
    if done:
        yield "quality", lambda: quality(done, summary)
        yield "memory", lambda: memory(done, summary)
        yield "setup", lambda: setup(done, summary)
        yield "ranks", lambda: ranks(done, summary)
    for kind in ("strong", "weak"):
        if several := [family for family in summary.scaling if family["kind"] == kind]:
            yield f"{kind}_scaling", lambda kind=kind, several=several: scaling(kind, several)
    if summary.network:
        yield "network", lambda: network(summary.network)


def times(done: list[dict], summary: Summary) -> Drawing:
    """Every run of every row, and the fastest rows again in a second panel if other rows are far slower."""
    ordered = sorted(done, key=lambda row: row["train_seconds"])
    shortest, longest = (ordered[at]["train_seconds"] for at in (0, -1))
    close = [row for row in ordered if row["train_seconds"] <= CLOSE * shortest]
    panels = [ordered, close] if len(close) > 1 and longest > 2 * shortest else [ordered]
    heights = [len(rows) + 1.5 for rows in panels]
    figure, grid = plt.subplots(
        len(panels),
        figsize=(WIDTH, LINE * sum(heights) + 0.5),
        layout="constrained",
        squeeze=False,
        height_ratios=heights,
    )
    tips = {}
    for panel, (axes, rows) in enumerate(zip(grid[:, 0], panels, strict=True)):
        name_lines(axes, [row["row"] for row in rows], [f" {row['train_seconds']:.3g} s" for row in rows])
        for position, row in enumerate(rows):
            tips |= _dots(axes, position, row["train_seconds"], summary.runs[row["row"]], f"{row['row']}-{panel}")
    grid[0, 0].set_xlim(left=0)
    grid[0, 0].set_xlabel(say("axis_train").en)
    if len(panels) > 1:
        grid[1, 0].set_xlabel(say("axis_train_close").en)
    best = choice.fastest(done)
    title = say("picture_times", row=best["row"], seconds=f"{best['train_seconds']:.3g}")
    # The first sentence may name another row, which is simpler and not shown to be slower.
    if (named := choice.recommended(done)) is not best:
        title += say("picture_times_named", row=named["row"], seconds=f"{named['train_seconds']:.3g}")
    every = [(row["row"], run) for row in ordered for run in succeeded(summary.runs[row["row"]])]
    table = [
        [name, str(run.repeat), f"{run.clock.train_seconds:.3f}", "; ".join(run.watch.disturbed)] for name, run in every
    ]
    return Drawing(
        figure,
        title if trusted(summary.runs[best["row"]]) else say("picture_times_disturbed"),
        say("picture_times_note"),
        [say("row"), same("#"), say("train_seconds"), say("disturbed")],
        table,
        tips,
    )


def _dots(axes: plt.Axes, position: int, median: float, runs: list[Run], name: str) -> dict[str, str]:
    """A dot for each of a row's runs, their median, and the range of those that count; returns the dots' tooltips."""
    tips, good = {}, [run.clock.train_seconds for run in good_runs(runs)]
    axes.plot([min(good), max(good)], [position, position], color=COLOURS[0], linewidth=2)
    axes.plot(median, position, "|", color=COLOURS[0], markersize=14, markeredgewidth=2)
    for run in succeeded(runs):
        seconds, disturbed = run.clock.train_seconds, run.watch.disturbed
        gid = f"run-{name}-{run.repeat}"
        axes.plot(
            seconds,
            position,
            "o",
            color=COLOURS[1],
            markerfacecolor="none" if disturbed else COLOURS[1],
            markersize=6,
            gid=gid,
            zorder=4 if disturbed else 3,  # a ring is visible around a dot, but not below one
        )
        row = name.rpartition("-")[0]
        tips[gid] = f"{row} #{run.repeat}: {seconds:.3g} s" + "".join(f"; {why}" for why in disturbed)
    return tips


def step_parts(done: list[dict], summary: Summary) -> Drawing:
    """Where a row's step time goes: its phases, which add up to it, in the proportions of the recorded steps."""
    profiles = {row["row"]: reasons.of_step(summary.profiles[row["row"]], row["step_ms"] / 1000) for row in done}
    ordered = sorted(profiles, key=lambda name: sum(profiles[name]["seconds"].values()))
    figure, axes = bars(ordered)
    values = [[1000 * profiles[name]["seconds"][phase] for phase in PHASES] for name in ordered]
    tips = stack(axes, ordered, values, [say(f"phase_{phase}") for phase in PHASES], "part", "ms")
    axes.set_xlabel(say("axis_ms").en)
    waiting = max(ordered, key=lambda name: profiles[name]["seconds"]["communication"])
    most = profiles[waiting]["seconds"]["communication"]
    ways = [way for way in (most, profiles[waiting]["exposed_by_difference"]) if way is not None and way > 0]
    talking, silent = (
        [
            same(f"{name} {1000 * profiles[name]['exposed_by_difference']:.1f} ms")
            for name in ordered
            if (profiles[name]["seconds"]["communication"] > 0) == talks
            and profiles[name]["exposed_by_difference"] is not None
        ]
        for talks in (True, False)
    )
    each = {"difference": talking, "null": silent}
    return Drawing(
        figure,
        say("picture_steps", row=waiting, ms=reasons.milliseconds(ways)) if most else say("picture_steps_none"),
        say(
            "picture_steps_note", **{name: join(texts, say("comma")) if texts else "–" for name, texts in each.items()}
        ),
        [say("row"), *(say(f"phase_{phase}") for phase in PHASES)],
        [[name, *(f"{value:.2f}" for value in line)] for name, line in zip(ordered, values, strict=True)],
        tips,
    )


def losses(done: list[dict], summary: Summary) -> Drawing:
    """Losses over steps, as differences from single's because equal models' losses coincide; and losses over seconds.

    Without a row of `single` with equally many steps, the losses over steps are drawn themselves. Rows whose curves
    coincide share a line. Over seconds, the rows of the report's first sentence have a colour, and all others are grey.
    """
    runs = {row["row"]: median_run(row, summary) for row in done}
    baseline = next((row["row"] for row in done if row["strategy"] == BASELINE), None)
    counts = {len(run.losses) for run in runs.values()}
    alike = baseline is not None and len(counts) == 1
    window = max(1, max(counts) // 25)
    smooth = {name: _smoothed(run.losses, min(window, len(run.losses))) for name, run in runs.items()}
    over_steps = {name: values - smooth[baseline] if alike else values for name, values in smooth.items()}
    figure, (above, below) = plt.subplots(2, 1, figsize=(WIDTH, 2 * HEIGHT - 0.2), layout="constrained")
    for position, names in enumerate(_coinciding(over_steps)):
        values = over_steps[names[0]]
        steps = np.arange(len(values)) + len(runs[names[0]].losses) - len(values) + 1
        keep = _visible(len(values))
        rest = f" +{len(names) - 2}" if len(names) > 2 else ""
        above.plot(steps[keep], values[keep], label=", ".join(names[:2]) + rest, **_line(position))
    slowest = max(done, key=lambda row: row["train_seconds"])["row"]
    named = list(dict.fromkeys([*([baseline] if baseline else []), choice.recommended(done)["row"], slowest]))
    others = {"color": COLOURS[-1], "linewidth": 0.5}
    for name in sorted(runs, key=lambda name: name in named):  # the named rows lie over the others
        values, count = smooth[name], len(runs[name].losses)
        seconds = np.arange(count - len(values) + 1, count + 1) / count * runs[name].clock.train_seconds
        keep = _visible(len(values))
        style = _line(named.index(name)) | {"label": name} if name in named else others
        below.plot(seconds[keep], values[keep], **style)
    if len(named) < len(runs):
        below.plot([], [], label=say("axis_other_rows").en, **others)
    above.set_xlabel(say("axis_step").en)
    below.set_xlabel(say("axis_seconds").en)
    above.set_ylabel(say("axis_loss_difference" if alike else "axis_loss").en)
    below.set_ylabel(say("axis_loss").en)
    below.set_xlim(left=0)
    for axes in (above, below):
        axes.legend(frameon=False, fontsize=9, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))
    table = []
    for name, run in runs.items():
        line = [name, *(f"{run.losses[at]:.4f}" for at in (0, len(run.losses) // 2, -1))]
        if alike:
            of_one_step = np.subtract(run.losses, runs[baseline].losses)
            line += [f"{np.abs(values).max():.2g}" for values in (over_steps[name], of_one_step)]
        table.append(line)
    title = say("picture_losses_plain")
    if alike and len(runs) > 1:
        largest = max(float(np.abs(values).max()) for values in over_steps.values())
        dropout = any(any(run.settings.get("dropout") or ()) for run in runs.values())
        why = say("picture_losses_dropout") if dropout else same("")
        each = say("picture_losses_mean", window=window) if window > 1 else say("picture_losses_each")
        title = say("picture_losses", difference=f"{largest:.2g}", each=each, why=why)
    note = say("picture_losses_note", window=window, left=say("losses_left" if alike else "losses_left_plain"))
    differences = [say("losses_smoothed", window=window), say("losses_single_step")] if alike else []
    header = [say("row"), same("1"), same("1/2"), same("1/1"), *differences]
    return Drawing(figure, title, note, header, table)


def _coinciding(curves: dict[str, np.ndarray]) -> list[list[str]]:
    """The names of curves, those together that can't be told apart: they differ by 1 % of the drawn range at most."""
    values = np.concatenate(list(curves.values()))
    visible = 0.01 * (values.max() - values.min())
    groups: list[list[str]] = []
    for name, curve in curves.items():
        for group in groups:
            first = curves[group[0]]
            if len(first) == len(curve) and np.abs(first - curve).max() <= visible:
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


def _visible(count: int) -> np.ndarray:
    """The positions of at most 60 points of a curve: more would not be visible, and make the file large."""
    return np.linspace(0, count - 1, min(count, 60)).astype(int)


def _line(position: int) -> dict:
    """The colour and style of a line; no two lines share both."""
    style = STYLES[(position + position // len(COLOURS)) % len(STYLES)]
    return {"color": COLOURS[position % len(COLOURS)], "linewidth": 1.4, "linestyle": style}


def terms(done: list[dict], summary: Summary) -> Drawing:
    """The terms of a loss that is a sum of several: one row's over steps, and in the table all rows' at the end."""
    runs = {row["row"]: median_run(row, summary) for row in done}
    shown = next((row["row"] for row in done if row["strategy"] == BASELINE), done[0]["row"])
    factors = runs[shown].asked["train"].get("loss_weights") or {}
    names = list(runs[shown].terms)
    counts = len(runs[shown].losses)
    window = max(1, counts // 25)
    figure, axes = plt.subplots(figsize=(WIDTH, HEIGHT), layout="constrained")
    steps = np.arange(window, counts + 1)
    keep = _visible(len(steps))
    for position, name in enumerate(names):
        smooth = _smoothed(runs[shown].terms[name], window)
        label = name if factors.get(name, 1) == 1 else f"{name} (x {factors[name]:g})"
        axes.plot(steps[keep], smooth[keep], label=label, **_line(position))
    axes.set_xlabel(say("axis_step").en)
    axes.set_ylabel(say("axis_loss").en)
    axes.set_ylim(bottom=0)
    figure.legend(**LEGEND, ncols=3)
    table = [
        [name, *(f"{np.mean(of_steps[-window:]):.4f}" for of_steps in (*map(run.terms.get, names), run.losses))]
        for name, run in runs.items()
    ]
    header = [say("row"), *map(same, names), say("axis_loss")]
    note = say("picture_terms_note", window=window)
    return Drawing(figure, say("picture_terms", row=shown), note, header, table)


def _smoothed(values: list[float], window: int) -> np.ndarray:
    """Moving means over `window` values: [values - window + 1]."""
    return np.convolve(values, np.ones(window) / window, mode="valid")


def quality(done: list[dict], summary: Summary) -> Drawing:
    name = registry.deciding_quality(summary.config["task"])
    figure, axes = plt.subplots(figsize=(WIDTH, HEIGHT), layout="constrained")
    tips = {}
    for position, row in enumerate(done):
        gid = f"quality-{row['row']}"
        axes.plot(
            row["train_seconds"],
            row[name],
            MARKERS[position % len(MARKERS)],
            color=COLOURS[position % len(COLOURS)],
            markersize=8,
            linestyle="none",
            label=row["row"],
            gid=gid,
        )
        tips[gid] = f"{row['row']}: {row['train_seconds']:.3g} s, {say(name).en} {row[name]:.4f}"
    axes.set_xlabel(say("axis_train").en)
    axes.set_ylabel(on_test_split(name).en)
    axes.set_xlim(left=0)
    figure.legend(**LEGEND, ncols=3)
    table = [[row["row"], f"{row['train_seconds']:.3f}", f"{row[name]:.4f}"] for row in done]
    header = [say("row"), say("train_seconds"), say(name)]
    title = say("picture_quality_down" if QUALITIES[name].lower_is_better else "picture_quality")
    return Drawing(figure, title, say("picture_quality_note", figure=say(name)), header, table, tips)


def memory(done: list[dict], summary: Summary) -> Drawing:
    ordered = sorted(done, key=lambda row: row["peak_memory_mb"])
    figure, axes = bars([row["row"] for row in ordered])
    # A row that an earlier version measured has only the peak.
    before = [row["memory_before_mb"] or 0.0 for row in ordered]
    values = [[had, max(0.0, row["peak_memory_mb"] - had)] for had, row in zip(before, ordered, strict=True)]
    parts = [say("memory_before_mb"), say("memory_window_mb")]
    tips = stack(axes, [row["row"] for row in ordered], values, parts, "memory", "MiB")
    axes.set_xlabel(say("axis_memory").en)
    least = ordered[0]["peak_memory_mb"]
    lowest = [row["row"] for row in ordered if row["peak_memory_mb"] <= AS_LITTLE * least]
    table = [
        [
            row["row"],
            *("" if row[key] is None else f"{row[key]:.0f}" for key in MEMORY),
        ]
        for row in ordered
    ]
    if len(lowest) > 1:
        title = say("picture_memory_several", rows=some(lowest), mb=f"{float(f'{least:.2g}'):.0f}")
    else:
        title = say("picture_memory", rows=lowest[0], mb=f"{least:.0f}")
    header = [say("row"), *map(say, MEMORY)]
    return Drawing(figure, title, say("picture_memory_note"), header, table, tips)


def setup(done: list[dict], summary: Summary) -> Drawing:
    """The parts of start-up and training. The parts are shares of one run, and add up to the times of the table."""
    ordered = sorted(done, key=lambda row: row["startup_seconds"])
    figure, axes = bars([row["row"] for row in ordered])
    names = [*SETUP, "first", "train"]
    values = []
    for row in ordered:
        clock = median_run(row, summary).clock
        scale = row["startup_seconds"] / clock.first_step_seconds
        parts = [scale * clock.setup.get(part, 0.0) for part in SETUP]
        first = max(0.0, row["startup_seconds"] - sum(parts))
        values.append([*parts, first, max(0.0, row["train_seconds"] - first)])
    header = [say(f"setup_{name}") for name in names]
    tips = stack(axes, [row["row"] for row in ordered], values, header, "setup", "s")
    axes.set_xlabel(say("axis_setup").en)
    soonest = ordered[0]
    title = say("picture_setup", row=soonest["row"], seconds=f"{soonest['startup_seconds']:.1f}")
    return Drawing(
        figure,
        title if trusted(summary.runs[soonest["row"]]) else say("picture_setup_disturbed"),
        say("picture_setup_note"),
        [say("row"), *header],
        [[row["row"], *(f"{v:.2f}" for v in line)] for row, line in zip(ordered, values, strict=True)],
        tips,
    )


def ranks_are_usual(summary: Summary) -> bool:
    """Whether every row has one rank per device on one machine, so that a picture of the ranks tells nothing new."""
    asked = [median_run(row, summary).asked["hardware"] for row in summary.finished_rows]
    return all(hardware["nodes"] == 1 and hardware["processes"] == device_count(hardware) for hardware in asked)


def ranks(done: list[dict], summary: Summary) -> Drawing:
    """Which rank trains on which device: a rank is a process, which may share a device or have several."""
    figure, axes = bars([row["row"] for row in done])
    table, most = [], 1
    for position, row in enumerate(done):
        run = median_run(row, summary)
        hardware, nodes = run.asked["hardware"], run.asked["hardware"]["nodes"]
        processes, devices = hardware["processes"], device_count(hardware)
        for node in range(1, nodes):
            axes.plot([node * devices / nodes - 0.5] * 2, [position - 0.45, position + 0.45], color=COLOURS[-1])
        for device in range(devices):
            axes.barh(position, 0.84, left=device - 0.42, height=0.66, fill=False, edgecolor=COLOURS[-1])
        if processes < devices:  # one rank drives them all
            axes.plot([0, devices - 1], [position, position], color=COLOURS[0])
        for rank in range(max(processes, devices)):
            sharing = math.ceil(processes / devices)  # ranks on one device
            node, local = divmod(rank, max(processes, devices) // nodes)
            device, turn = local % (devices // nodes), local // (devices // nodes)
            at = node * devices // nodes + device + 0.7 * ((turn + 0.5) / sharing - 0.5)
            axes.plot(at, position, "o", color=COLOURS[0], markersize=11)
            axes.text(at, position, str(min(rank, processes - 1)), **INSIDE)
        where = "; ".join(f"{node['host']} ({node['interface']})" for node in run.nodes)
        table.append(
            [row["row"], str(processes), str(devices), str(nodes), where or "-", run.settings["backend"] or "-"]
        )
        most = max(most, devices)
    axes.set_xlim(-0.5, max(most, 4) - 0.5)
    axes.set_xticks(range(most))
    axes.set_xlabel(say("axis_device").en)
    header = [say("row"), say("ranks"), say("devices"), say("nodes"), say("hosts"), say("backend")]
    return Drawing(figure, say("picture_ranks"), say("picture_ranks_note"), header, table)


def scaling(kind: str, families: list[dict]) -> Drawing:
    """The gain over the number of devices; kind: strong or weak (report/scaling.py)."""
    figure, axes = plt.subplots(figsize=(WIDTH, HEIGHT), layout="constrained")
    counts = sorted({size["devices"] for family in families for size in family["sizes"]})
    axes.plot([1, counts[-1]], [1, counts[-1]], ":", color=COLOURS[-1])
    table = []
    for position, family in enumerate(families):
        sizes, colour = family["sizes"], COLOURS[position % len(COLOURS)]
        devices, gains = [size["devices"] for size in sizes], [size["gain"] for size in sizes]
        axes.plot(devices, gains, MARKERS[position % 12] + "-", color=colour, label=family["name"])
        for size in sizes:
            if size["gain_low"] is not None:
                axes.plot([size["devices"]] * 2, [size["gain_low"], size["gain_high"]], color=colour, linewidth=1)
            between = "-" if size["gain_low"] is None else f"{size['gain_low']:.2f} - {size['gain_high']:.2f}"
            efficiency = f"{100 * size['efficiency']:.0f} %"
            numbers = [str(size["devices"]), str(size["nodes"]), f"{size['gain']:.2f}", between, efficiency]
            table.append([size["row"], *numbers, family["against"]])
    axes.set_xlabel(say("axis_devices").en)
    axes.set_ylabel(say(f"gain_{kind}").en)
    axes.set_xticks(counts)
    axes.set_ylim(bottom=0)
    figure.legend(**LEGEND, ncols=3)
    header = [say("row"), say("devices"), say("nodes"), say(f"gain_{kind}"), say("gain_interval")]
    header += [say("efficiency"), say("gain_against")]
    return Drawing(figure, say(f"picture_{kind}_scaling"), say(f"picture_{kind}_scaling_note"), header, table)


def network(measured: list[dict]) -> Drawing:
    """Bus bandwidth over the size of the message, for each operation and number of ranks (lockstep/network.py)."""
    figure, axes = plt.subplots(figsize=(WIDTH, HEIGHT), layout="constrained")
    table = []
    for style, each in zip(itertools.cycle(STYLES), measured, strict=False):
        for position, (operation, found) in enumerate(each["operations"].items()):
            sizes = [point["bytes"] for point in found["points"]]
            bandwidths = [point["bus_bandwidth"] / 1e9 for point in found["points"]]
            colour, mark = COLOURS[position % len(COLOURS)], MARKERS[position % 12]
            name = f"{operation}, {each['ranks']}"
            axes.plot(sizes, bandwidths, marker=mark, markersize=4, linestyle=style, color=colour, label=name)
            fitted = "-" if found["bandwidth"] is None else three(found["bandwidth"] / 1e9)
            numbers = [three(1e6 * found["latency"]), fitted, f"{100 * found['worst']:.0f} %"]
            table.append([operation, str(each["ranks"]), each["backend"], *numbers, "; ".join(each["disturbed"])])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([2**10, 2**14, 2**20, 2**24, 2**28], ["1 KiB", "16 KiB", "1 MiB", "16 MiB", "256 MiB"])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(say("axis_message").en)
    axes.set_ylabel(say("axis_bus").en)
    figure.legend(**LEGEND, ncols=2)
    header = [say(key) for key in ("operation", "ranks", "backend", "latency", "bandwidth", "fit_worst", "disturbed")]
    return Drawing(figure, say("picture_network"), say("picture_network_note"), header, table)


def confusion(done: list[dict], summary: Summary) -> plt.Figure:
    """Every row's confusion matrix in one figure, as a file for papers; the page shows them as tables."""
    columns = min(4, len(done))
    lines = math.ceil(len(done) / columns)
    figure, grid = plt.subplots(
        lines, columns, figsize=(3 * columns, 3 * lines), layout="constrained", squeeze=False, sharex=True, sharey=True
    )
    for axes in grid.flat[len(done) :]:
        axes.set_visible(False)
    for axes, row in zip(grid.flat, done, strict=False):
        counts = np.array(median_run(row, summary).test["confusion_matrix"], dtype=float)
        fractions = counts / counts.sum(axis=1, keepdims=True).clip(min=1)
        axes.imshow(fractions, cmap="Blues", vmin=0, vmax=1)
        for at, fraction in np.ndenumerate(fractions):
            axes.text(
                at[1],
                at[0],
                f"{100 * fraction:.0f}",
                ha="center",
                va="center",
                fontsize=8,
                color="w" if fraction > 0.5 else "k",
            )
        axes.set_title(row["row"], fontsize=10)
        axes.set_xticks(range(len(fractions)))
        axes.set_yticks(range(len(fractions)))
    return figure


def median_run(row: dict, summary: Summary) -> Tested:
    """The run whose training time is the row's median, or the next below it."""
    runs = sorted(good_runs(summary.runs[row["row"]]), key=lambda run: run.clock.train_seconds)
    return runs[(len(runs) - 1) // 2]


def bars(names: list[str]) -> tuple[plt.Figure, plt.Axes]:
    """A figure with a line for each name, the first on top."""
    figure, axes = plt.subplots(figsize=(WIDTH, 1.4 + LINE * len(names)), layout="constrained")
    name_lines(axes, names)
    return figure, axes


def name_lines(axes: plt.Axes, names: list[str], beside: list[str] | None = None) -> None:
    """A line for each name, the first on top, followed by the text in `beside`."""
    short = [name if len(name) <= 24 else name[:23] + "…" for name in names]
    axes.set_yticks(
        range(len(names)), [name + more for name, more in zip(short, beside or [""] * len(names), strict=True)]
    )
    axes.set_ylim(len(names) - 0.5, -0.5)


def stack(axes, names, values, labels: list[Text], prefix: str, unit: str) -> dict[str, str]:
    """Horizontal bars made of parts; returns the parts' tooltips."""
    tips, starts = {}, np.zeros(len(names))
    for part, label in enumerate(labels):
        lengths = np.array([line[part] for line in values])
        drawn = axes.barh(
            range(len(names)),
            lengths,
            left=starts,
            height=0.66,
            color=COLOURS[part % len(COLOURS)],
            alpha=1 if part < len(COLOURS) else 0.55,
            edgecolor="white",
            linewidth=0.5,
            label=label.en,
        )
        for bar, name, length in zip(drawn, names, lengths, strict=True):
            if length > 0.1 * max(
                map(sum, values)
            ):  # written into the part too, so that colour is not the only information
                axes.text(bar.get_x() + length / 2, bar.get_y() + bar.get_height() / 2, three(length), **INSIDE)
            bar.set_gid(f"{prefix}-{name}-{part}")
            tips[bar.get_gid()] = f"{name}, {label.en}: {three(length)} {unit}"
        starts += lengths
    for position, total in enumerate(starts):
        axes.text(total + 0.01 * starts.max(), position, f"{three(total)} {unit}", va="center", fontsize=9)
    axes.set_xlim(0, starts.max() * 1.24)
    axes.figure.legend(**LEGEND, ncols=2)
    return tips
