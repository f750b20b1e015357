"""The guide: what its pages print is what their snippets print, its commands work, both languages show the same code.

A block of Python is followed by what it prints, as a block of text. One with a title is a file that commands start; it
lies in docs/guide/snippets where a reader is to start it there.
"""

import contextlib
import importlib.util
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from lockstep import columns, paths
from lockstep.config.machine import free_port
from lockstep.files import write_csv, write_text
from lockstep.report import page as report_page
from lockstep.report import paper
from tests.conftest import PROJECT, copy_project
from tests.test_readme import all_commands

GUIDE = PROJECT / "docs" / "guide"
PROGRAMS = sorted((GUIDE / "snippets").glob("*.py"))
PAGES = sorted(file for file in GUIDE.glob("*.md") if not file.name.endswith(".zh.md"))
FENCE = re.compile(r'^```(\w+)(?: title="([\w.]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
LAUNCHERS = ("torchrun ", "python -m torch.distributed.launch ", "accelerate ", "env DS_ACCELERATOR=cpu deepspeed ")
LAUNCHERS += tuple(f"python {program.name}" for program in PROGRAMS)
COMPOSE = "docker compose -f docker/two-hosts.compose.yaml up"  # tests/run/test_hosts.py
FORKED = re.compile(r"(?:torchrun --standalone --nproc-per-node (\d)|python) (?!workers|threads)(\w+\.py)")  # forks.py


@dataclass(frozen=True)
class Block:
    page: Path
    language: str
    title: str
    code: str
    output: str | None  # where the next block is text

    @property
    def name(self) -> str:
        return f"{self.page.stem}: {self.code.strip().splitlines()[-1]}"


def blocks(page: Path) -> list[Block]:
    fences = FENCE.findall(page.read_text(encoding="utf-8"))
    following = [*fences, ("", "", "")][1:]
    return [
        Block(page, language, title, code, after[2] if after[0] == "text" else None)
        for (language, title, code), after in zip(fences, following, strict=True)
    ]


BLOCKS = [block for page in PAGES for block in blocks(page)]
SNIPPETS = [block for block in BLOCKS if block.language == "python" and not block.title]
COMMANDS = [(line, block) for block in BLOCKS if block.language == "sh" for line in block.code.splitlines()]
LAUNCHES = [pair for pair in COMMANDS if pair[0].startswith(LAUNCHERS)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_both_languages_show_the_same_code_and_link_to_the_same_pages(page):
    chinese = page.with_suffix(".zh.md")
    assert FENCE.findall(chinese.read_text(encoding="utf-8")) == FENCE.findall(page.read_text(encoding="utf-8"))
    links = []
    for text in (page.read_text(encoding="utf-8"), chinese.read_text(encoding="utf-8")):
        found = re.findall(r"\]\(([^)\s]+)\)", text)
        assert len(found) == text.count("](") > 0  # the expression finds every link
        links.append({re.sub(r"\.zh\.(svg|md)$", r".\1", link.split("#")[0]) for link in found})
    assert links[0] == links[1]


LINKED = [*PAGES, *(page.with_suffix(".zh.md") for page in PAGES), PROJECT / "README.md", PROJECT / "README.zh-CN.md"]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+?)\s*$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_links_lead_to_pages_of_the_same_language_and_to_headings_that_are_there(page):
    chinese = ".zh" in page.suffixes or "zh-CN" in page.name
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text(encoding="utf-8"))
    assert links, "the expression finds none"
    for name, anchor in links:
        target = page if not name else (page.parent / name).resolve()
        assert target.exists(), name
        if target.suffix == ".md":
            there = ".zh" in target.suffixes
            translated = target.with_suffix(".zh.md").is_file() or there
            assert not translated or there == chinese or target == page, f"{name} is in the other language"
            assert not anchor or anchor in anchors(target), f"{name}#{anchor}"


def leave_a_report(folder: Path) -> None:
    """The tables of a small report, by the names that the product gives their columns."""
    seconds = {"single": [10.0, 10.4, 9.9], "ddp": [6.0, 6.1, 6.05], "fsdp": [8.1, 8.1, 9.9]}
    speedups = {"single": (1.0, 1.0, 1.0), "ddp": (1.66, 1.6, 1.73), "fsdp": (1.24, 1.19, 1.29)}
    rows, runs = [], []
    for name, place in {"single": 3, "ddp": 1, "fsdp": 2}.items():
        row = dict.fromkeys(columns.KEYS) | {"row": name, "proof": "equal", "status": "ok", "place": place}
        names = ("speedup", "speedup_low", "speedup_high")
        rows.append(row | {"train_seconds": seconds[name][0]} | dict(zip(names, speedups[name], strict=True)))
        for number, taken in enumerate(seconds[name], 1):
            disturbed = "others" if (name, number) == ("fsdp", 3) else ""
            about = {"row": name, "repetition": number, "status": "ok", "disturbed": disturbed, "train_seconds": taken}
            runs.append(about)
    rows[1]["train_seconds"] = 6.05
    header = [*paper.ABOUT_RUN, *(column.key for column in columns.MEASURED)]
    write_text(folder / paths.TABLE, report_page.as_csv(rows))
    write_csv(folder / paths.RUNS_TABLE, header, [[run.get(name, "") for name in header] for run in runs])


def test_the_page_has_every_column_of_the_tables():
    """Else: make docs"""
    program = runpy.run_path(str(PROJECT / "docs" / "columns.py"))
    for language, name in program["PAGES"].items():
        assert program["written"](language) == (GUIDE / name).read_text(encoding="utf-8")
    table = program["table"]("en")
    there = {*columns.KEYS, *paper.ABOUT_RUN, *(column.key for column in columns.MEASURED)}
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == there
    assert not re.search(r"\|\s*\|$", table, re.MULTILINE), "each has a meaning"


@pytest.mark.parametrize("block", SNIPPETS, ids=lambda block: block.name)
def test_a_snippet_prints_what_its_page_says(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert block.output is not None
    if block.page.stem == "recipes":
        leave_a_report(tmp_path / "results" / "report")
        leave_a_report(tmp_path / "results" / "quick" / "report")
    if "start_processes" in block.code:  # forks, which a process that runs tests should not
        done = subprocess.run([sys.executable, "-c", block.code], capture_output=True, text=True, check=False)
        assert done.stdout == block.output, done.stderr
        return
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), torch.random.fork_rng():
        exec(compile(block.code, block.page.name, "exec"), {"__name__": "__main__"})
    assert printed.getvalue() == block.output


def lines(printed: str) -> list[str]:
    """What was printed, in an order of its own, as ranks take turns at random; without what differs from run to run."""
    # An unbuffered rank writes the end of its line by itself, perhaps after another's line.
    printed = re.sub(r"(?<=\w)(?=rank \d)", "\n", printed)
    return sorted(re.sub(r"\d+\.\d+ s$", "# s", line) for line in printed.splitlines() if line)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_a_page_shows_the_program_that_it_names(program):
    shown = [block for block in BLOCKS if block.title == program.name]
    if not shown:  # too long for a page, which links to it
        assert any(f"](snippets/{program.name})" in page.read_text(encoding="utf-8") for page in PAGES)
    for block in shown:
        assert block.code == program.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def forked(tmp_path_factory) -> dict[str, str]:
    """What each program printed that forks can start, by its name."""
    folder = tmp_path_factory.mktemp("snippets")
    started = []
    for command, _ in LAUNCHES:
        if (match := FORKED.fullmatch(command)) and (file := GUIDE / "snippets" / match[2]).is_file():
            shutil.copy(file, folder)
            started += [match[1] or "1", file.name, str(free_port("auto"))]
    program = [sys.executable, PROJECT / "tests" / "forks.py", *started]
    variables = os.environ | {"PYTHONUNBUFFERED": "", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {file.stem: file.read_text(encoding="utf-8") for file in folder.glob("*.py.txt")}


@pytest.mark.parametrize(
    "block", [block for command, block in LAUNCHES if FORKED.fullmatch(command) and block.output], ids=lambda b: b.name
)
def test_ranks_print_what_their_page_says(block, forked):
    assert lines(forked[FORKED.fullmatch(block.code.strip())[2]]) == lines(block.output)


def test_the_page_tells_what_backends_can_do_as_it_was_tried(forked):
    header, _, *tried = [cells(row) for row in forked["can.py"].splitlines()]
    page = (GUIDE / "collectives.md").read_text(encoding="utf-8")
    shown = [cells(row) for row in re.findall(r"^\| `.*", page, re.MULTILINE)]
    assert header[1] == "gloo, cpu"
    assert [row[:2] for row in tried] == [row[:2] for row in shown]


IMPOSSIBLE = """
import os, time, can
for trial in (lambda mine, rank: 1 / 0, lambda mine, rank: (mine, mine + rank), lambda mine, rank: os._exit(1)):
    print(can.tried(trial, "gloo", "cpu"))
can.SECONDS = 2
print(can.tried(lambda mine, rank: time.sleep(60), "gloo", "cpu"))
"""


def test_what_a_backend_cant_do_is_told_from_what_it_can():
    command = [sys.executable, "-c", IMPOSSIBLE]
    done = subprocess.run(command, cwd=GUIDE / "snippets", capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["no", "no", "ends its process", "waits"]


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "block"),
    [
        pytest.param(*pair, marks=[] if FORKED.fullmatch(pair[0]) or not pair[1].output else [pytest.mark.ci])
        for pair in LAUNCHES
    ],
)
def test_a_launcher_starts_as_many_processes_as_the_page_says(command, block, tmp_path):
    for file in BLOCKS:
        if file.title:
            (tmp_path / file.title).write_text(file.code)
    for program in PROGRAMS:
        shutil.copy(program, tmp_path)
    beside = Path(sys.executable).parent
    environment = {"PATH": f"{beside}:/usr/bin:/bin", "HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    program = re.search(r"(\w+)\.py", command)[1]
    if judge := JUDGES.get(program):
        found = (re.findall(r"\d+\.\d|\d+(?= MiB)", line) for line in done.stdout.splitlines())
        judge(*(list(map(float, numbers)) for numbers in found))
        assert re.sub(r"\d+", "#", done.stdout) == re.sub(r"\d+", "#", block.output)
    elif block.output:
        assert lines(done.stdout) == lines(block.output)
    elif (
        program != "can"
    ):  # whose table is held to the page elsewhere; two processes write at once, so that lines may run together
        said = sorted(re.findall(r"rank \d of \d, local rank \d", done.stdout))
        assert said == [f"rank {n} of 2, local rank {n}" for n in (0, 1)]


def of_threads(large, small, python):
    """How long two threads take, each over one; on a machine that others use it says nothing, so any time will do."""
    assert min(large[0], small[0]) > 0
    assert python[0] > 1.2, "one lock: two threads of Python take turns"


def of_workers(forked_list, forked_array, forked_nothing, spawned_list, spawned_array, spawned_nothing):
    """MiB of a worker, at first and at the end, of 61 MiB in a list and 15 in an array."""
    assert forked_list[1] - forked_list[0] > 40
    assert forked_array[1] - forked_array[0] < 8
    assert forked_array[0] - forked_nothing[0] < 8
    assert spawned_list[0] - spawned_nothing[0] > 50
    assert 10 < spawned_array[0] - spawned_nothing[0] < 25


JUDGES = {"threads": of_threads, "workers": of_workers}  # of what differs from run to run


def test_other_commands_are_those_that_are_tried():
    others = {line for line, _ in COMMANDS} - {line for line, _ in LAUNCHES} - {COMPOSE}
    others = {line for line in others if not line.startswith(("lockstep prove ", "lockstep gate "))}  # tests/script
    assert others <= set(all_commands())


@pytest.mark.slow
@pytest.mark.ci
def test_the_site_is_built_strictly_and_asks_nothing_of_the_network(site):
    pages = list(site.rglob("*.html"))
    for page in ("index.html", "docs/guide/words.html", "docs/strategies.html", "config/index.html"):
        assert site / page in pages
        assert site / "zh" / page in pages
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r"""(?:src=|<link[^>]+href=|url\()["']?(?:https?:)?//[^"')\s]+""", text), page
    assert "术语图解" in (site / "zh/docs/guide/words.html").read_text(encoding="utf-8")
    assert (site / "docs/guide/words.html").read_text(encoding="utf-8").count('<svg role="img" aria-label="') == 2


@pytest.mark.slow
@pytest.mark.parametrize("link", ["nowhere.md", "words.md#nowhere"])
def test_a_dead_link_ends_the_build(link, tmp_path):
    need_mkdocs()
    copy = copy_project(tmp_path / "project").folder
    page = copy / "docs" / "guide" / "measuring.zh.md"
    page.write_text(page.read_text(encoding="utf-8") + f"\n[x]({link})\n", encoding="utf-8")
    done = build(copy, tmp_path / "site")
    assert done.returncode == 1
    assert "nowhere" in done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    need_mkdocs()
    folder = tmp_path_factory.mktemp("guide") / "site"
    done = build(PROJECT, folder)
    assert done.returncode == 0, done.stderr
    return folder


def need_mkdocs() -> None:
    if importlib.util.find_spec("mkdocs_static_i18n") is None:
        pytest.skip("the guide is built with MkDocs: make site installs it")


def build(project: Path, folder: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "docs/build_site.py", "--site-dir", str(folder)]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
