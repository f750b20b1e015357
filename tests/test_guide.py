"""The guide: what its pages print is what their snippets print, its commands work, both languages show the same code.

A block of Python is followed by what it prints, as a block of text. One with a title is a file that commands start.
"""

import contextlib
import importlib.util
import io
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.conftest import PROJECT, copy_project
from tests.test_readme import all_commands

GUIDE = PROJECT / "docs" / "guide"
PAGES = sorted(file for file in GUIDE.glob("*.md") if not file.name.endswith(".zh.md"))
FENCE = re.compile(r'^```(\w+)(?: title="([\w.]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
LAUNCHERS = ("torchrun ", "python -m torch.distributed.launch ", "accelerate ", "env DS_ACCELERATOR=cpu deepspeed ")


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
    links = [
        {link.split("#")[0].replace(".zh.svg", ".svg") for link in re.findall(r"\]\(([^)\s]+)\)", text)}
        for text in (page.read_text(encoding="utf-8"), chinese.read_text(encoding="utf-8"))
    ]
    assert links[0] == links[1]


@pytest.mark.parametrize("block", SNIPPETS, ids=lambda block: block.name)
def test_a_snippet_prints_what_its_page_says(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert block.output is not None
    if "start_processes" in block.code:  # forks, which a process that runs tests should not
        done = subprocess.run([sys.executable, "-c", block.code], capture_output=True, text=True, check=False)
        assert done.stdout == block.output, done.stderr
        return
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), torch.random.fork_rng():
        exec(compile(block.code, block.page.name, "exec"), {"__name__": "__main__"})
    assert printed.getvalue() == block.output


@pytest.mark.slow
@pytest.mark.parametrize(("command", "block"), LAUNCHES)
def test_a_launcher_starts_as_many_processes_as_the_page_says(command, block, tmp_path):
    for file in BLOCKS:
        if file.title:
            (tmp_path / file.title).write_text(file.code)
    words = shlex.split(command)
    beside = Path(sys.executable).parent / words[0]
    program = [str(beside)] if beside.exists() else [words[0]]
    environment = {"PATH": f"{beside.parent}:/usr/bin:/bin", "HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*program, *words[1:]], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # Two processes write at once, so that lines may run together.
    said = sorted(re.findall(r"rank \d of \d, local rank \d|^\d$", done.stdout, re.MULTILINE))
    expected = block.output.split() if block.output else [f"rank {n} of 2, local rank {n}" for n in (0, 1)]
    assert said == expected


def test_other_commands_are_those_that_are_tried():
    others = {line for line, _ in COMMANDS} - {line for line, _ in LAUNCHES}
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
