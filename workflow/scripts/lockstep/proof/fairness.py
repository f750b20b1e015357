"""Check the rules of a fair comparison on the files of a results folder."""

import datetime
import itertools
import math
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep import columns, paths
from lockstep.analysis import blocks, staleness
from lockstep.config import configuration, reading, registry
from lockstep.config.configuration import Config
from lockstep.config.hardware import busy_cores
from lockstep.config.row import times_trained
from lockstep.config.sections import Train
from lockstep.data.plan import Plan
from lockstep.errors import BadInput, RunFailed
from lockstep.files import read_json, verify
from lockstep.model.schedule import lr_factor, other_rates
from lockstep.proof import verdicts
from lockstep.proof.verdicts import PROVEN
from lockstep.run import facts, journal, record_files, seals, watcher
from lockstep.run.ledger import check_ledger
from lockstep.run.record import Record, Tested

OF_A_VERDICT = {"losses", "norm", "update"}
DISTURBED, TOO_FEW = "it was disturbed: ", "are needed to tell a difference from chance"
STALLED = 0.02  # the largest share of the training time that may be lost to warm-up
STEPS_AGREE, STEPS_AGREE_SECONDS = 0.02, 0.05  # how far the sum of steps may be from the training time
IDLE = 300  # seconds that a block may be idle; it may also be idle for as long as its runs took
# Facts of the machine that must be the same for all rows, or a difference would be attributed to the strategy.
MACHINE = ("machine", "kernel", "cpu", "cores", "memory_mb", "gpus", "python", "cuda", "cudnn", "nccl", "mps")
PROVENANCE = ("commit", "in_container")
VOUCHED_FOR = (paths.RECORD, paths.LEDGER, paths.STEPS, paths.ENVIRONMENT)  # of a run, by its line in the journal
OF_THE_REPORT = (
    "clock",
    "hashes",
    "precision",
    "division",
    "world_size",
    "started",
    "throughput",
    "losses",
    "strategy",
)

Breach = tuple[str, str]


@dataclass(frozen=True)
class Findings:
    """What a check examined, and the breaches of rules that it found."""

    runs: int
    rows: int
    breaches: list[Breach]


def check(results: Path) -> Findings:
    """Check all runs in a results folder. Raises BadInput if there are none."""
    files = paths.run_files(results, paths.RECORD)
    if not files:
        raise BadInput(f"{results}: holds no run with a record. Name a results folder, as in: check.py results/")
    breaches, records = [], {}
    for file in files:
        try:
            records[file.parent] = record_files.read_run(file.parent)
        except BadInput as error:
            breaches.append((str(file.parent), str(error)))
    breaches += [(str(file.parent), "it failed") for file in paths.run_files(results, paths.FAILED)]
    for folder, run in records.items():
        for rule in (_placed, _trained, sealed, _timed):
            breaches += _readable(str(folder), ((str(folder), breach) for breach in rule(folder, run, results)))
    for rule in (_together, _blocks, _rows, _decided, _current, _written, _foretold, _reported):
        breaches += _readable(str(results), rule(records, results))
    return Findings(len(files), len({run.row for run in records.values()}), breaches)


def is_counted(breach: str) -> bool:
    """Whether a breach already shows in medians and intervals: disturbed runs are left out, or there are too few."""
    return breach.startswith(DISTURBED) or TOO_FEW in breach


def _readable(where: str, breaches: Iterator[Breach]) -> Iterator[Breach]:
    """Yield these breaches, and a breach for a missing or damaged file if one prevents the check."""
    try:
        yield from breaches
    except BadInput as error:
        yield where, str(error)
    except OSError as error:
        yield where, f"not all of it can be checked: {error.filename}: {error.strerror}"
    except (KeyError, ValueError, TypeError, zipfile.BadZipFile) as error:
        yield where, f"not all of it can be checked: {error!r}"


def _current(records: dict[Path, Record], results: Path) -> Iterator[Breach]:
    """Records must have the settings that their rows have now."""
    now = _asked(results)
    for folder, run in records.items() if now else ():
        if run.row in now.rows and (why := staleness.written(now, run)):
            yield str(folder), f"it was {why}"


def _asked(results: Path) -> Config | None:
    """The requested configuration; None if there is none.

    Nor is there for an unpacked record: on another machine a configuration may mean something else, or nothing. Its
    rules were checked before it was packed.
    """
    asked = paths.config_file(results)
    return reading.read([asked]) if asked.is_file() and not paths.packed_file(results).is_file() else None


def _placed(folder: Path, run: Record, results: Path) -> Iterator[str]:
    """A record must be in the folder that its own content names."""
    own = paths.run_name(run.row, run.world_size, run.repeat)
    if folder != results / paths.RUNS / own:
        yield f"its record is that of {own}"
    if read_json(folder / paths.ENVIRONMENT).get("changed"):
        yield "it was made by files that differ from their commit"


def _ledger(folder: Path, run: Record, plan: Plan) -> Iterator[str]:
    """A run's ledger must hold each sample of its plan as often as its strategy trains it."""
    if run.strategy not in registry.names():
        yield f"its ledger can't be checked: {registry.path(run.strategy)}, its strategy, is not there; put it there"
        return
    asked = run.asked
    times = times_trained(run.strategy, asked["options"], asked["hardware"]["processes"])
    try:
        with np.load(folder / paths.LEDGER, allow_pickle=False) as ledger:
            check_ledger(dict(ledger), plan, times)
    except (OSError, RunFailed) as error:
        yield f"its ledger is wrong: {error}"


def _trained(folder: Path, run: Record, results: Path) -> Iterator[str]:
    """A run must have trained its plan, from the given data and weights, with the requested settings."""
    file = paths.plan_file(results, run.asked["plan"])
    if not file.is_file():
        yield f"its plan, {file}, does not exist any more"
    else:
        plan = Plan.load(file)
        if plan.hash != run.hashes["plan"]:
            yield "it trained another plan than the one that exists now"
        yield from _ledger(folder, run, plan)
        train = Train.of(run.asked["train"])
        factor = lr_factor(train, plan.steps, plan.epochs)
        asked = [train.learning_rate * factor(step) for step in range(plan.steps)]
        if other := other_rates(asked, run.rates):
            yield other
    data = read_json(paths.data_file(results))
    for name, wanted in (("data", data["hash"]), ("weights", data["weights"])):
        if run.hashes[name] != wanted:
            yield f"it started from other {name} than those that exist now"
    threads = read_json(folder / paths.ENVIRONMENT)["variables"].get("OMP_NUM_THREADS")
    if threads != str(run.asked["hardware"]["threads"]):
        yield f"OMP_NUM_THREADS was {threads}, but {run.asked['hardware']['threads']} threads were asked for"
    asked, settings = run.asked, run.settings
    rates = sorted({group["initial_lr"] for group in settings["groups"]})
    for name, wanted, live in (
        ("precision", asked["precision"], settings["precision"]),
        ("processes", asked["hardware"]["processes"], settings["world_size"]),
        ("threads", asked["hardware"]["threads"], settings["threads"]),
        ("learning rate", [asked["train"]["learning_rate"]], rates),
    ):
        if wanted != live:
            yield f"{name}: {wanted} was asked for, but {live} was used"


def sealed(folder: Path, run: Record, results: Path) -> Iterator[str]:
    """A run's checkpoint, and the model converted from it, must be unchanged, if they were kept."""
    weights = []
    for part in (paths.CHECKPOINT, paths.MODEL):
        if (folder / part).is_dir():
            try:
                manifest = verify(folder / part, "")
                weights.append(manifest.get("merged_from") or manifest.get("weights"))
            except RunFailed as error:
                yield f"its {part} is not as it was written: {error}".rstrip()
    if len(set(weights)) > 1:
        yield "its model has other weights than its checkpoint"


def _timed(folder: Path, run: Record, results: Path) -> Iterator[str]:
    """A run's times must be consistent, and nothing may have disturbed them."""
    clock, seconds = run.clock, run.clock.train_seconds
    total = clock.total_seconds
    if not (max(clock.setup.values(), default=0) <= clock.first_step_seconds <= total <= run.wall_seconds):
        yield "its clocks contradict each other"
    if not clock.step_seconds_median <= seconds <= total:
        yield f"its {seconds:.4g} s of training do not fit into the {total:.4g} s of the whole run"
    if seconds + (clock.evaluation_seconds or 0) > total:
        yield "its training and its evaluation took longer than the whole run"
    # In a disturbed run, which is a breach of its own below, steps stall because other programs took the cores.
    if (stalled := clock.stall_seconds) > STALLED * seconds and not run.watch.disturbed:
        yield f"its steps stalled for {stalled:.3g} of {seconds:.3g} s, on warm-up that should have come before them"
    if not math.isclose(run.throughput.samples_per_second, run.work.samples / seconds, rel_tol=1e-6):
        yield "its throughput is not its work divided by its training time"
    summaries = record_files.read_ranks(folder, run.asked["hardware"]["processes"])
    if not math.isclose(seconds, max(rank.clock.train_seconds for rank in summaries), rel_tol=1e-9):
        yield "its training time is not that of its slowest rank"
    steps = float(np.load(folder / paths.STEPS, allow_pickle=False).sum(axis=1).max())
    if not run.resumed and not math.isclose(steps, seconds, rel_tol=STEPS_AGREE, abs_tol=STEPS_AGREE_SECONDS):
        yield f"its steps took {steps:.4g} s, and its training {seconds:.4g} s"
    if not run.watch.samples and seconds > 2:
        yield "nothing watched the machine while it ran"
    window = record_files.window([rank for rank in summaries if rank.node == 0])
    cores, busy = read_json(folder / paths.ENVIRONMENT)["cores"], busy_cores(run.asked["hardware"])
    seen = watcher.judge(watcher.read(folder), window, cores, busy)
    if seen.samples != run.watch.samples:
        yield f"its record counts {run.watch.samples} samples of the machine, but there are {seen.samples}"
    for why in dict.fromkeys([*run.watch.disturbed, *seen.disturbed]):
        yield f"{DISTURBED}{why}"


def alike(name: str, ours: dict, theirs: dict) -> bool:
    """Whether two environments agree in `name`. Rows see only their own GPUs, so the common prefix is compared."""
    mine, other = ours.get(name), theirs.get(name)
    if name == "gpus" and mine and other:
        few = min(len(mine), len(other))
        return mine[:few] == other[:few]
    return mine == other


def _together(records: dict[Path, Record], results: Path) -> Iterator[Breach]:
    """All runs must agree in machine, versions and image; closed ones in plan and optimizer; none may overlap.

    Each repetition may have a plan of its own (vary_seed), in which its runs must agree.
    """
    first = next(iter(records), None)
    for folder in records:
        ours, theirs = read_json(folder / paths.ENVIRONMENT), read_json(first / paths.ENVIRONMENT)
        for name in (*MACHINE, *PROVENANCE):
            if not alike(name, ours, theirs):
                yield str(folder), f"{name} is {ours.get(name)}, but {theirs.get(name)} in {first}"
        for name, versions in other_versions(ours, theirs).items():
            yield str(folder), f"{name} is {versions[0]}, but {versions[1]} in {first}"
    builds: dict[str, tuple[str, Path]] = {}  # an image's digest, and the first run in it
    for folder in records:
        image, digest = (read_json(folder / paths.ENVIRONMENT).get(name) for name in ("image", "image_digest"))
        theirs, first = builds.setdefault(image, (digest, folder))
        if digest != theirs:
            yield str(folder), f"its build of the image {image} is {digest}, but {theirs} in {first}"
    closed = {folder: run for folder, run in records.items() if run.division == "closed"}
    for name, of in (
        ("plan", lambda run: run.hashes["plan"]),
        ("optimizer", lambda run: (run.settings["optimizer"], _shapes(run.settings["groups"]))),
        ("dropout", lambda run: run.settings["dropout"]),
    ):
        for folder, run in closed.items():
            if of(run) != of(next(other for other in closed.values() if name != "plan" or other.repeat == run.repeat)):
                yield str(folder), f"its {name} differs from the rest of the closed division"
    spans = sorted((_began(run), folder, run.wall_seconds) for folder, run in records.items())
    for (began, earlier, seconds), (next_began, later, _) in itertools.pairwise(spans):
        if next_began < began + seconds - 1:  # start times are stored in whole seconds
            yield str(later), f"it ran at the same time as {earlier}"


def _blocks(records: dict[Path, Record], results: Path) -> Iterator[Breach]:
    """The runs of a block, which are compared with each other, must follow each other closely."""
    blocks: dict[int, list[Record]] = {}
    for run in records.values():
        blocks.setdefault(run.repeat, []).append(run)
    for repeat, runs in sorted(blocks.items()):
        if len(sessions := {run.session for run in runs}) > 1:
            yield f"repetition {repeat}", f"its runs are of {len(sessions)} sessions; only those of one are compared"
        busy = sum(run.wall_seconds for run in runs)
        spent = max(_began(run) + run.wall_seconds for run in runs) - min(map(_began, runs))
        if spent - busy > max(IDLE, busy):
            yield f"repetition {repeat}", f"its runs took {busy:.0f} s, but are spread over {spent:.0f} s"


def other_versions(ours: dict, theirs: dict) -> dict[str, tuple[str, str]]:
    """Packages that two environments have in different versions. Packages that only one has don't count."""
    both = {name: (version, theirs["packages"].get(name)) for name, version in ours["packages"].items()}
    return {name: pair for name, pair in both.items() if None not in pair and pair[0] != pair[1]}


def _shapes(groups: list[dict]) -> list[dict]:
    """The settings of an optimizer's groups besides the learning rate, such as betas or momentum, and weight decay.

    Groups with equal settings count once, since a strategy may have divided one group.
    """
    shapes = [
        {name: value for name, value in group.items() if name not in ("initial_lr", "parameters")} for group in groups
    ]
    return [shape for number, shape in enumerate(shapes) if shape not in shapes[:number]]


def _began(run: Record) -> float:
    return datetime.datetime.fromisoformat(run.started).timestamp()


def _rows(records: dict[Path, Record], results: Path) -> Iterator[Breach]:
    """Every row must have whole blocks, enough repetitions, and a proof."""
    repeats: dict[str, set[int]] = {}
    for run in records.values():
        repeats.setdefault(run.row, set()).add(run.repeat)
    every = set().union(*repeats.values())
    wanted, decided, ended, quick = dict.fromkeys(repeats, every), None, False, False
    if paths.packed_file(results).is_file():  # a row leaves the contest when its time is known well enough
        wanted = {row: set(range(1, max(have) + 1)) for row, have in repeats.items()}
        ended = min(map(len, repeats.values())) >= configuration.FIRST_BLOCKS
    if now := _asked(results):
        quick = now.source["quick"]
        decided = blocks.last(now, results)
        if decided:
            ended = not decided["rows"]
            rows = repeats.keys() & now.rows.keys()
            wanted |= {row: set(blocks.repetitions(now, now.rows[row], results)) for row in rows}
    for row, have in repeats.items():
        if missing := sorted(wanted[row] - have):
            yield row, f"repetition {', '.join(map(str, missing))} is missing, so its blocks are incomplete"
        # Blocks that ended by their stopping rule are enough; the report says what they can't resolve. A first look
        # measures nothing, and says so.
        elif not ended and not quick and len(have) < (needed := blocks.needed(decided, row, len(wanted[row]))):
            yield row, f"{len(have)} repetition{'s' * (len(have) > 1)}; at least {needed} {TOO_FEW}"
        yield from ((row, breach) for breach in _proven(row, records, results))


def _proven(row: str, records: dict[Path, Record], results: Path) -> Iterator[str]:
    """A row must be proven to train the same model, with the code and packages that it was timed with."""
    files = paths.run_files(results, paths.VERDICT, paths.PARITY, row)
    if not files and not paths.run_files(results, paths.FAILED, paths.PARITY, row):
        yield "it was not compared with the reference: snakemake --cores all parity"
    elif not files:
        yield "its trial failed"
    for file in files:
        verdict = read_json(file)
        if verdict["proof"] == "unequal":
            yield "it trains another model than the reference"
            continue
        yield from contradictions(verdict)
        timed = read_json(next(folder for folder, run in records.items() if run.row == row) / paths.ENVIRONMENT)
        proven = read_json(file.parent / paths.ENVIRONMENT)
        differing = {name: (proven.get(name), timed.get(name)) for name in PROVENANCE}
        for name, (before, now) in (differing | other_versions(proven, timed)).items():
            if before != now:
                yield f"it was proven with {name} {before}, but timed with {now}"


def contradictions(verdict: dict) -> Iterator[str]:
    """Whether a verdict that says "the same model" is not what its own distances say."""
    if verdict["proof"] not in PROVEN:
        yield f"its verdict is {verdict['proof']}"
        return
    distances, exact = verdict["distances"], verdict["fp64"] or {}
    if missing := OF_A_VERDICT - verdict["tolerance"].keys():
        yield f"its verdict has no tolerance of {', '.join(sorted(missing))}"
    over = [name for name, most in verdict["tolerance"].items() if not distances[name] <= most]
    over += [f"{name} in fp64" for name, distance in exact.items() if not distance <= configuration.FP64_TOLERANCE]
    if (verdict.get("first_gradients") or {}).get("differing"):
        over.append("first gradients in fp64")
    if over:
        yield f"its verdict is {verdict['proof']}, but its {' and '.join(over)} say otherwise"


def _written(records: dict[Path, Record], results: Path) -> Iterator[Breach]:
    """Every file must be unchanged, and every requested row must have a record, by the journal."""
    lines = journal.read(results)
    if not lines:
        yield str(paths.journal_file(results)), "does not exist, so changes to files can't be found"
        return
    yield from journal.changed(results, lines)
    noted = {results / line["folder"]: line["files"] for line in lines if line["what"] == "run"}
    for folder in records:
        if folder not in noted:
            yield str(folder), "no line of the journal is about this run"
        elif missing := [name for name in VOUCHED_FOR if name not in noted[folder]]:
            yield str(folder), f"the journal has no hash of its {', '.join(missing)}"
    proofs = {results / line["folder"] for line in lines if line["what"] == "proof"}
    for file in paths.run_files(results, paths.VERDICT, paths.PARITY):
        if file.parent not in proofs:
            yield str(file.parent), "no line of the journal is about this proof"
    requests = [line for line in lines if line["what"] == "request"]
    trained = {run.row for run in records.values()}
    trained |= {paths.row_of(file.parent) for file in paths.run_files(results, paths.FAILED)}
    for row in requests[-1]["rows"] if requests else ():
        if row not in trained:
            yield row, "it was asked for, but no run of it has a record"


def _foretold(records: dict[Path, Record], results: Path) -> Iterator[Breach]:
    """What was foretold of a row must have been sealed before its first run, and be what the report says."""
    yield from seals.broken(results)
    file, sealed = paths.report_folder(results) / paths.SUMMARY, seals.read(results)
    for told in (read_json(file).get("foretold") or {}).get("rows", ()) if file.is_file() else ():
        own = (sealed or {"rows": {}})["rows"].get(told["row"], {}).get("seconds")
        if own != told["foretold"]:
            yield told["row"], "the report has another forecast than the one that was sealed"


def _decided(records: dict[Path, Record], results: Path) -> Iterator[Breach]:
    """The decisions on further blocks must follow from the records; each is computed again."""
    now = _asked(results)
    others = verdicts.not_compared(now, results) if now else []
    for block, decided in enumerate(blocks.decisions(now, results), configuration.FIRST_BLOCKS) if now else ():
        # A verdict may have come later than the decision. Those of an earlier version left out none.
        left_out = [name for name in others if name in decided.get("left_out", ())]
        again = blocks.decide(now, results, block, left_out)
        # The predicted time of the next block is not compared, as its runs may have been made since.
        measured = None not in (decided["width"], again["width"])
        same_width = math.isclose(decided["width"], again["width"]) if measured else decided["width"] == again["width"]
        if decided["contending"] != again["contending"] or not same_width:
            yield str(paths.decision_file(results, block)), "does not follow from the records"


def _reported(records: dict[Path, Record], results: Path) -> Iterator[Breach]:
    """The report must agree with the records; each row's medians are computed again."""
    file = paths.report_folder(results) / paths.SUMMARY
    if not file.is_file():
        return
    report = read_json(file)
    for line in report["rows"]:
        yield from ((line["row"], f"the report has {what}") for what in columns.out_of_range(line))
        runs = {folder: run for folder, run in records.items() if run.row == line["row"]}
        yield from ((line["row"], f"the report has {what}") for what in _told_otherwise(line, report, runs, results))
        good = {folder: run for folder, run in runs.items() if not run.watch.disturbed} or runs
        if line["train_seconds"] is None or not good:
            continue
        tested = [Tested(**vars(run), test=read_json(folder / paths.TEST_REPORT)) for folder, run in good.items()]
        for column in columns.MEASURED:
            if column.key == "step_ms" and "median_step_ms" not in line:
                continue  # an earlier version used this name for the median
            # None: a figure of another task, or one that the device does not report.
            if (told := line.get(column.key)) is None or (spread := columns.median(column, tested)) is None:
                continue
            if not math.isclose(told, spread.median, rel_tol=1e-9):
                yield line["row"], f"the report has {column.key} {told:.6g}, but its records have {spread.median:.6g}"


def _told_otherwise(line: dict, report: dict, runs: dict[Path, Record], results: Path) -> Iterator[str]:
    """What the report says of a row and its runs, and no file bears out."""
    if line["train_seconds"] is not None and not runs:
        yield "a time, and no run of it has a record"
    made = {(run.repeat, run.session): run for run in runs.values()}
    for raw in report["runs"].get(line["row"], ()):
        if raw["status"] != "ok":
            continue
        run = facts.of(Record, raw)
        own = made.get((run.repeat, run.session))
        if own is None:
            yield f"a repetition {run.repeat}, which has no record"
        else:
            names = [name for name in OF_THE_REPORT if getattr(run, name) != getattr(own, name)]
            yield from (f"another {name} of repetition {run.repeat} than its record" for name in names)
    if not runs:
        return
    if (division := next(iter(runs.values())).division) != line["division"]:
        yield f"it in the division {line['division']}, and its records in {division}"
    proofs = {read_json(file)["proof"] for file in paths.run_files(results, paths.VERDICT, paths.PARITY, line["row"])}
    if line["proof"] in PROVEN and proofs and line["proof"] not in proofs:
        yield f"the proof {line['proof']}, and its verdict is {' and '.join(sorted(proofs))}"
