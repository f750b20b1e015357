"""The gate of a pull request: does a change train the same model as before, and is it not slower?

Both states of a repository run the same command. First each is recorded, and their models are compared step by step
(recording.py, findings.py). Then both are timed in blocks: a block has one run of each, in turns who is first. So slow
drifts of a shared machine meet both alike, and what is compared are seconds per optimizer step, without the start of
the processes. The ratio has the interval of paired runs (stats.ratio).
"""

import filecmp
import itertools
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from scipy.special import stdtrit

from lockstep import stats
from lockstep.errors import BadInput, RunFailed, RunStopped, printable
from lockstep.script import findings, recording
from lockstep.script.commits import Tree
from lockstep.script.findings import Finding

PASSED, SLOWER, UNEQUAL = "passed", "slower", "unequal"  # verdicts
UNDECIDED, NOT_MEASURED = "undecided", "not measured"
EQUAL, UNTOLD = findings.EQUAL, findings.UNTOLD  # of the model; or UNEQUAL
FEWEST_BLOCKS = 5  # before anything is decided
CONFIDENCE = 0.98  # of the interval; so of 100 changes that are no slower than the limit, one is called slower
MOST_MORE = 1000  # blocks that could still decide; more are not named
TRIED = 10  # timed steps of the first run, which shows how long a step takes
WINDOW = 3.0  # seconds of a timed run, by default


@dataclass(frozen=True)
class Asked:
    """What is compared, and how long.

    slower: the limit as a share (0.05 is 5 %); steps: timed steps of a run, 0 to choose them; compared: steps whose
    models are compared.
    """

    command: list[str]
    slower: float
    blocks: int = 10
    minutes: float = 30.0
    steps: int = 0
    warm_up: int = 3
    compared: int = 8
    patience: float = 600.0
    keep_dropout: bool = False


@dataclass(frozen=True)
class Speed:
    """The ratio of the change's seconds per step to the base's, with its interval (CONFIDENCE).

    more: how many further blocks would likely decide, if this many do not; None if it is decided, or more than 1,000.
    """

    ratio: float
    low: float
    high: float
    blocks: int
    verdict: str
    more: int | None = None


@dataclass
class Outcome:
    """What a gate found, as in gate.json."""

    verdict: str
    reason: str
    base: dict
    ours: dict
    command: list[str]
    limit: float
    model: str = UNTOLD
    findings: list[Finding] = field(default_factory=list)
    speed: Speed | None = None
    steps: int = 0  # of a timed run
    world: int = 0
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"base": [], "ours": []})  # per step, by block
    torch: str = ""
    minutes: float = 0.0


def judge(base: list[float], ours: list[float], limit: float, last: bool) -> Speed:
    """Judge two lists of seconds per step, whose entries of the same place are of one block (at least two blocks).

    A change passes as soon as the interval lies below 1 + limit. It is slower only if the interval lies above that
    after the last block: looking often for that would raise false alarms.
    """
    times = [{(place, None): value for place, value in enumerate(each)} for each in (ours, base)]
    fitted = stats.ratio(*times, CONFIDENCE)
    border, blocks = 1 + limit, len(base)
    verdict = UNDECIDED
    if blocks >= FEWEST_BLOCKS and fitted.high < border:
        verdict = PASSED
    elif blocks >= FEWEST_BLOCKS and last and fitted.low > border:
        verdict = SLOWER
    more = _blocks_to_decide(base, ours, border) if verdict == UNDECIDED else None
    return Speed(fitted.value, fitted.low, fitted.high, blocks, verdict, more)


def _blocks_to_decide(base: list[float], ours: list[float], border: float) -> int | None:
    """How many more blocks would decide, if ratios go on to vary as they did."""
    logarithms = np.log(ours) - np.log(base)
    away, deviation = abs(float(logarithms.mean()) - np.log(border)), float(logarithms.std(ddof=1))
    blocks = len(base) + np.arange(1, MOST_MORE + 1)
    decides = stdtrit(blocks - 1, (1 + CONFIDENCE) / 2) * deviation / np.sqrt(blocks) < away
    enough = np.flatnonzero(decides & (blocks >= FEWEST_BLOCKS))
    return int(enough[0]) + 1 if len(enough) else None


def run(
    base: Tree,
    ours: Tree,
    asked: Asked,
    repository: Path,
    work: Path,
    tell: Callable[[str], None],
    shared: list[Path] | None = None,
) -> Outcome:
    """Compare two trees, and keep logs and recordings in `work`. tell: prints a line of progress.

    repository: the user's own, from which neither tree may import a module; shared: paths in it that both trees have.
    """
    shared = shared or []
    began = time.monotonic()
    outcome = Outcome(
        *(NOT_MEASURED, ""),
        *({"name": tree.name, "commit": tree.commit} for tree in (base, ours)),
        *(asked.command, asked.slower),
    )
    before = _stamps(shared)
    asked = replace(asked, command=_startable(asked.command, ours, repository))
    runs = Runs(asked, repository, work, (base, ours))
    try:
        outcome.model, found, outcome.torch = _compare_models(base, ours, runs)
        outcome.findings = [replace(each, says=printable(each.says)) for each in found]
        tell(f"model: {outcome.model}")
        for finding in outcome.findings:
            tell(f"- {finding.level}: {told(finding)}")
        if changed := before ^ _stamps(shared):
            raise RunFailed(
                f"a run changed {min(changed)[0]}, which both commits share, so that the second read what the first"
                " wrote. Run the command once before, or share less"
            )
        if outcome.model == EQUAL:  # how fast another model trains is no answer
            _time(base, ours, runs, outcome, began + 60 * asked.minutes, tell)
    except (RunStopped, BadInput):
        raise
    except RunFailed as error:
        outcome.reason = str(error)
    outcome.minutes = (time.monotonic() - began) / 60
    _conclude(outcome)
    return outcome


def _startable(command: list[str], tree: Tree, repository: Path) -> list[str]:
    """A command whose program is the user's own where the copies lack it, as .venv/bin/python, which Git ignores."""
    program, within = Path(command[0]), Path.cwd().resolve().relative_to(repository)
    if program.is_absolute() or len(program.parts) == 1 or (tree.folder / within / program).exists():
        return command
    # Links are not followed, since a Python finds its environment by them.
    return [os.path.abspath(program), *command[1:]] if program.exists() else command


def _stamps(shared: list[Path]) -> set[tuple[str, float, int]]:
    """Name, time of change and size of all shared files."""
    files = [path for each in shared for path in (each.rglob("*") if each.is_dir() else [each]) if path.is_file()]
    return {(str(file), file.stat().st_mtime, file.stat().st_size) for file in files if "__pycache__" not in file.parts}


def _conclude(outcome: Outcome) -> None:
    """The verdict of both parts. Another model counts even if nothing could be timed."""
    outcome.reason = printable(outcome.reason)
    if outcome.model == UNEQUAL:
        outcome.verdict, outcome.reason = UNEQUAL, findings.wrong_of(outcome.findings)[0].says
    elif outcome.speed and not outcome.reason:
        outcome.verdict, outcome.reason = outcome.speed.verdict, speed_told(outcome)


def told(finding: Finding) -> str:
    """A finding in a line, with the script's line if it is known."""
    return f"{finding.says} ({finding.line})" if finding.line else finding.says


def speed_told(outcome: Outcome) -> str:
    """The result of timing, of which there must be one, in a sentence."""
    speed = outcome.speed
    interval = f"{speed.low:.3f} to {speed.high:.3f}, {100 * CONFIDENCE:.0f} %, {speed.blocks} blocks"
    text = f"a step takes {speed.ratio:.3f} times as long as in {outcome.base['name']} ({interval})"
    if speed.verdict != UNDECIDED:
        return text
    more = f"{speed.more} more" if speed.more else f"more than {MOST_MORE:,} more"
    return f"{text}; {more} blocks would decide"


class Runs:
    """Runs the command in a tree, in the part of the repository that the user is in, with a log for each run."""

    def __init__(self, asked: Asked, repository: Path, work: Path, trees: tuple[Tree, Tree]):
        self.asked, self.repository, self.work = asked, repository, work
        self.contents = {tree.folder.name: tree.contents() for tree in trees}
        self.within = Path.cwd().resolve().relative_to(repository)
        self.paths: dict[str, list[str]] = {"base": [], "ours": []}  # of each tree, for modules of the user's tree
        self.count = 0

    @property
    def compared(self) -> recording.Asked:
        """How both are recorded, to compare their models."""
        return recording.Asked(self.asked.compared, self.asked.keep_dropout, self.asked.patience)

    def record(self, tree: Tree) -> recording.Recording:
        """Record a tree for as many steps as models are compared."""
        command, asked = self.command(tree), self.compared
        recorded = self._checked(tree, lambda folder, place: recording.record(command, folder, asked, place))
        if how := recorded.broken_off(asked.steps):
            raise RunFailed(f"{tree.name}: the command {how}: {recorded.last_words}")
        return recorded

    def rounding(self, tree: Tree, recorded: recording.Recording) -> list[tuple[float, float]]:
        """How far rounding alone moves each step of a recorded tree. Raises RunFailed if that can't be measured."""
        replays = [
            self._checked(
                tree,
                lambda folder, place, backwards=backwards: recording.replay(
                    recorded, folder, self.compared, backwards=backwards, variables=place.variables
                ),
            )
            for backwards in (False, True)
        ]
        return findings.rounding_of(*replays)

    def time(self, tree: Tree, steps: int) -> recording.Timing:
        """Time a tree for so many steps after those that warm up."""
        asked = recording.Asked(steps + self.asked.warm_up, patience=self.asked.patience)
        command, warm_up = self.command(tree), self.asked.warm_up
        return self._checked(tree, lambda folder, place: recording.time_steps(command, folder, asked, place, warm_up))

    def block(self, base: Tree, ours: Tree, steps: int, number: int) -> dict[str, recording.Timing]:
        """One run of each tree, by the names of their folders; in every second block ours is first."""
        order = (base, ours) if number % 2 == 0 else (ours, base)
        return {tree.folder.name: self.time(tree, steps) for tree in order}

    def command(self, tree: Tree) -> list[str]:
        """The command in a tree: files of the user's tree that it names by their whole path are the copy's."""
        return [self._in_tree(word, tree) for word in self.asked.command]

    def _checked(self, tree: Tree, run):
        """Run in a tree; if modules came from the user's own or a copy of it, run again with the tree's in front.

        Raises RunFailed if they still don't come from the tree.
        """
        result = self._one(tree, run)
        if result.elsewhere:
            name, file = next(iter(result.elsewhere.items()))
            roots = {_root(name, file, self.repository) for name, file in result.elsewhere.items()}
            roots |= {*roots_in(self.contents[tree.folder.name], by_package(result.elsewhere)).values()}
            paths = {str(tree.folder / root) for root in roots if root is not None}
            self.paths[tree.folder.name] = sorted({*self.paths[tree.folder.name], *paths})
            try:
                result = self._one(tree, run)
            except RunStopped:
                raise
            except RunFailed as error:
                raise RunFailed(f"{error} (with its own {name} in front of {file})") from None
        outside = {name: file for name, file in result.others.items() if not Path(file).is_relative_to(tree.folder)}
        if elsewhere := result.elsewhere | copies_among(outside, *self.contents.values()):
            name, file = next(iter(elsewhere.items()))
            raise RunFailed(
                f"{tree.name}: its module {name} was imported from {file}, not from the commit's own files, so that"
                " both commits would run the same code. Install the repository by `pip install -e`, or set PYTHONPATH"
            )
        return result

    def _one(self, tree: Tree, run):
        tree.reset()
        self.count += 1
        folder = self.work / f"{self.count:03d}-{tree.folder.name}"
        folder.mkdir(parents=True)
        place = recording.Place(tree.folder / self.within, self._variables(tree), folder / "log.txt")
        if not place.folder.is_dir():
            raise RunFailed(f"{tree.name}: it has no folder {self.within}")
        try:
            return run(folder / "recording", place)
        except RunStopped:
            raise
        except (BadInput, RunFailed) as error:
            raise RunFailed(f"{tree.name}: {error}") from None

    def _variables(self, tree: Tree) -> dict[str, str]:
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        mapped = [self._in_tree(path, tree) for path in given if path]
        paths = os.pathsep.join([*self.paths[tree.folder.name], *mapped])
        # As GITHUB_WORKSPACE, by which scripts find their repository.
        copies = {name: self._in_tree(value, tree) for name, value in os.environ.items() if name not in KEPT}
        named = {name: value for name, value in copies.items() if value != os.environ[name]}
        variables = {"LOCKSTEP_ELSEWHERE": str(self.repository), "PWD": str(tree.folder / self.within)}
        return named | variables | ({"PYTHONPATH": paths} if paths else {})

    def _in_tree(self, text: str, tree: Tree) -> str:
        """A text with the copies of all paths within the user's tree that have one, as in --config=/home/me/x.yaml."""
        whole = self._copy_of(text, tree)
        return whole if whole != text else PATH.sub(lambda match: self._copy_of(match[0], tree), text)

    def _copy_of(self, word: str, tree: Tree) -> str:
        path = Path(word)
        try:
            if not path.is_absolute() or not path.exists() or not path.resolve().is_relative_to(self.repository):
                return word
        except (OSError, ValueError):  # as for a text that is too long for a path
            return word
        copy = tree.folder / path.resolve().relative_to(self.repository)
        return str(copy) if copy.exists() else word


PATH = re.compile(r"/[^\s:;,=\"'()|&<>]+")  # in a text
KEPT = ("HOME", "OLDPWD", "PYTHONPATH")  # where caches are, though it be the repository; and what has its own rule


def _root(name: str, file: str, repository: Path) -> Path | None:
    """The folder, within the repository, that must be on Python's path for a module of this name to be this file."""
    path = Path(file)
    levels = name.count(".") + (path.name == "__init__.py")
    folder = path.parents[levels] if levels < len(path.parents) else path
    inside = folder.is_relative_to(repository) and "site-packages" not in path.parts
    return folder.relative_to(repository) if inside else None


def by_package(modules: dict[str, str]) -> dict[str, list[str]]:
    """The Python files of each package among modules (files by name), as paths from the folder on Python's path.

    A package is the outermost one that has a file, as several may share a namespace; or a module in none.
    """
    packages: dict[str, list[str]] = {}
    for name, file in modules.items():
        if file.endswith(".py") and name != "__main__":
            parts = name.split(".")
            package = next(each for each in itertools.accumulate(parts, "{}.{}".format) if each in modules)
            levels = len(parts) + (Path(file).name == "__init__.py")
            packages.setdefault(package, []).append("/".join(Path(file).parts[-levels:]))
    return packages


def roots_in(contents: dict[str, str], packages: dict[str, list[str]]) -> dict[str, str]:
    """The folder in a tree from which Python would import a package's files, for each package that is there.

    contents: as of Tree; packages: as of `by_package`. A package is there if most of its files are. Fewer may be by
    chance, as where a repository has another package of the same name.
    """
    package_of = {file: package for package, files in packages.items() for file in files}
    counts: dict[str, Counter] = {package: Counter() for package in packages}
    for path in contents:
        parts = path.split("/")
        for start in range(len(parts)):
            if package := package_of.get("/".join(parts[start:])):
                counts[package]["/".join(parts[:start])] += 1
    most = {package: max(roots.items(), key=lambda each: each[1]) for package, roots in counts.items() if roots}
    return {package: root for package, (root, count) in most.items() if 2 * count > len(packages[package])}


def copies_among(modules: dict[str, str], base: dict[str, str], ours: dict[str, str]) -> dict[str, str]:
    """Those of modules (files by name) that belong to a package of the repository in which its two commits differ.

    They come from a copy that is installed, of whatever commit. base, ours: the contents of the two trees.
    """
    packages = by_package(modules)
    roots = [roots_in(contents, packages) for contents in (base, ours)]
    found = {}
    for package, files in packages.items():
        if len(files) == 1 and "-packages" not in modules[package]:
            continue  # in a folder of the user's own, a single file may have any other's name
        texts = [
            _texts_of(package, root[package], contents) if package in root else {}
            for root, contents in zip(roots, (base, ours), strict=True)
        ]
        if texts[0] != texts[1]:
            found |= {name: file for name, file in modules.items() if f"{name}.".startswith(f"{package}.")}
    return found


def _texts_of(package: str, root: str, contents: dict[str, str]) -> dict[str, str]:
    """The contents of a package in a tree, by path from the folder that is on Python's path."""
    above = f"{root}/" if root else ""
    begins = tuple(above + package.replace(".", "/") + end for end in ("/", ".py"))
    return {path.removeprefix(above): digest for path, digest in contents.items() if path.startswith(begins)}


def _compare_models(base: Tree, ours: Tree, runs: Runs) -> tuple[str, list[Finding], str]:
    """Whether both train the same model, what was found, and the version of PyTorch.

    Raises RunFailed if that can't be told.
    """
    before, now = runs.record(base), runs.record(ours)
    torch = _version(now)
    for tree, recorded in ((base, before), (ours, now)):
        if file := _read_from_elsewhere(recorded, base, ours, runs.repository):
            raise RunFailed(
                f"{tree.name}: it read {file} in your own folder, so that both commits would read the same, though they"
                " differ in it. Name it by a path from the script, or from where the command is started"
            )
    no_numbers = ""
    if step := findings.not_finite(before):
        where = "both commits" if findings.not_finite(now) == step else base.name
        no_numbers = f"in step {step} weights become infinite or NaN in {where}, and nothing can be compared with them"
        before, now = before.until(step - 1), now.until(step - 1)
    if not before.steps:
        raise RunFailed(no_numbers)
    found = findings.two_commits(now, before)
    wrong = findings.wrong_of(found)
    if not wrong and no_numbers:
        raise RunFailed(no_numbers)
    if not wrong:
        return EQUAL, found, torch
    if findings.wrong_of(findings.two_commits(runs.record(base).until(before.steps), before)):
        raise RunFailed(f"two runs of {base.name} alone differ as well, so that the command needs a seed")
    if {each.kind for each in wrong} <= {"gradient", "step"}:
        # Sums in another order are no other model: how far that goes is measured, by the base alone.
        rounding, unknown = findings.measured(lambda: runs.rounding(base, before)[: before.steps])
        if unknown:
            if findings.wrong_of(findings.two_commits(now, before, findings.NOT_FAR)):
                return UNEQUAL, found, torch
            raise RunFailed(
                f"{wrong[0].says}, by less than {findings.FAR:.0%}; how far rounding goes is not known: {unknown}"
            )
        if findings.ABOVE_FLOOR * max(map(max, rounding)) > findings.TOO_HIGH:
            raise RunFailed(f"{wrong[0].says}, but rounding alone moves {base.name} by {max(map(max, rounding)):.1%}")
        found = findings.two_commits(now, before, rounding)
    if no_numbers and not findings.wrong_of(found):
        raise RunFailed(no_numbers)
    return (UNEQUAL if findings.wrong_of(found) else EQUAL), found, torch


def _read_from_elsewhere(recorded: recording.Recording, base: Tree, ours: Tree, repository: Path) -> Path | None:
    """A file that was read from the user's own tree, and that the two commits do not have alike."""
    for file in sorted(recorded.read):
        name = Path(file).relative_to(repository)
        copies = [tree.folder / name for tree in (base, ours)]
        present = [copy for copy in copies if copy.is_file()]
        no_content = any(name.is_relative_to(path) for path in ours.shared) or {".git", "__pycache__"} & {*name.parts}
        if present and not no_content and (len(present) == 1 or not filecmp.cmp(*present, shallow=False)):
            return name
    return None


def _version(recorded: recording.Recording) -> str:
    for file in sorted(recorded.folder.glob("started.*.json")):
        return json.loads(file.read_text(encoding="utf-8")).get("torch", "")
    return ""


def steps_of_a_run(tried: recording.Timing) -> int:
    """So many steps as take about three seconds, by a run that tried a few."""
    # The mean is too long where something disturbed a step, and the median too short where work is only queued.
    return max(TRIED, round(WINDOW / (tried.seconds * tried.median) ** 0.5))


def _time(base: Tree, ours: Tree, runs: Runs, outcome: Outcome, until: float, tell: Callable[[str], None]) -> None:
    """Time both trees in blocks, until it is decided, or the blocks or the minutes are used up."""
    asked = runs.asked
    first = runs.time(base, asked.steps or TRIED)  # not counted: it reads files that later runs have in memory
    steps = asked.steps or steps_of_a_run(first)
    ends = False  # whether it is known that the command ends after these steps
    outcome.world = first.world
    longest = 0.0
    while (block := len(outcome.seconds["base"])) < asked.blocks:
        began = time.monotonic()
        if block and began + longest > until:
            break
        timed = runs.block(base, ours, steps, block)
        counts = {name: (timing.steps, timing.world) for name, timing in timed.items()}
        if counts["base"] != counts["ours"]:
            raise RunFailed(
                f"{outcome.base['name']} did {counts['base'][0]} timed steps on {counts['base'][1]} ranks, and"
                f" {outcome.ours['name']} {counts['ours'][0]} on {counts['ours'][1]}, so their steps are not comparable"
            )
        if counts["base"][0] < steps and not ends:
            # The command has fewer steps. So many are timed, or the last would be taken while its work is still queued.
            steps, ends = counts["base"][0], True
            continue
        outcome.steps = counts["base"][0]
        for name, timing in timed.items():
            outcome.seconds[name].append(timing.seconds)
        longest = max(longest, time.monotonic() - began)
        if block:
            outcome.speed = speed = judge(outcome.seconds["base"], outcome.seconds["ours"], asked.slower, last=False)
            tell(f"block {block + 1} of {asked.blocks}: {speed.ratio:.3f} ({speed.low:.3f} to {speed.high:.3f})")
            if speed.verdict != UNDECIDED:
                return
    if len(outcome.seconds["base"]) < FEWEST_BLOCKS:
        raise RunFailed(
            f"{len(outcome.seconds['base'])} blocks in {asked.minutes:g} minutes, and at least {FEWEST_BLOCKS} are"
            " needed: raise --minutes, or lower --steps"
        )
    # Only here is it known that there are no more, however short of time a block has ended.
    outcome.speed = judge(outcome.seconds["base"], outcome.seconds["ours"], asked.slower, last=True)
