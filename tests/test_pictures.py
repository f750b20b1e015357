"""What the README's picture and the recorded terminal show is what the product says: else `make pictures` is due."""

import ast
import hashlib
import re
from functools import cache

import pytest

from lockstep.config import registry
from lockstep.paths import SCRIPTS
from lockstep.report import words
from lockstep.view import live
from tests.conftest import PROJECT

DOCS = PROJECT / "docs"
# What frameworks, Snakemake and the data say in between, and units.
OTHERS = {"s", "ms", "MiB", "cpu", "gpu", "CPU", "GPU", "x", "n", "e", "min", "AMD", "EPYC", "Intel", "Xeon", "R"}
OTHERS |= {"fp16", "fp32", "bf16", "rank", "exploding", "all_threads", "RunFailed", "Processor", "scratch", "text"}
UNTIL = 3  # letters: shorter words are left to chance


@cache
def fragments() -> tuple[str, ...]:
    """Whatever stands between what is filled in, of all that the report and the programs say; the longest first."""
    told = [words.say(key).en if "{" not in english else english for key, (english, _) in words._entries().items()]
    templates = {piece.strip(" .,;:()") for text in told for piece in re.split(r"\{[^}]*\}", text)}
    said = set()
    for file in SCRIPTS.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
                said.update(line for line in node.value.splitlines())
    # In what is printed a single word counts, too: between figures it may be all that is said.
    for file in [*SCRIPTS.glob("*.py"), *(SCRIPTS / "lockstep" / "view").glob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                templates.update(part.value.strip(" .,;:()") for part in node.values if isinstance(part, ast.Constant))
    for rule in (PROJECT / "workflow" / "rules").glob("*.smk"):
        for text in re.findall(r'"([^"\n]*)"', rule.read_text(encoding="utf-8")):
            templates.update(piece.strip(" .,;:()") for piece in re.split(r"\{[^}]*\}", text))
    several = {piece for line in said if " " in (piece := line.strip(" .,;:()"))}
    return tuple(sorted((several | templates | {*live.COLUMNS}) - {""}, key=len, reverse=True))


def unsaid(text: str, names: set[str]) -> list[str]:
    """The words of a text that are in nothing that the product says now; commands are left to their own tests."""
    text = re.sub(r"lockstep \w+(?: --[\w-]+ \S+)*", " ", text)
    for piece in fragments():
        if piece in text:
            before = r"(?<!\w)" if piece[0].isalnum() else ""  # "'s time" follows a name
            text = re.sub(rf"{before}{re.escape(piece)}(?!\w)", " ", text)
    known = OTHERS | names | {*registry.names()}
    return [word for word in re.findall(r"[A-Za-z_]\w*", text) if len(word) > UNTIL and word not in known]


@pytest.mark.parametrize(
    ("text", "old"),
    [
        ("Use ddp: 1.59 times as fast as single (1.44 to 1.77), the same model.", False),
        ("On 2 CPU cores (AMD EPYC); fp32; global batch 64, 162 steps; repetitions: 3", False),
        ("On this machine (2 CPU processes), ddp_amp trains fastest, not distinguishable from fabric", True),
        ("Same model as single, step by step? 10 equal (single, ddp)", True),
        ("Medians over undisturbed runs; below training times their quartiles. A heading sorts.", True),
    ],
)
def test_what_is_not_said_any_more_is_seen(text, old):
    assert bool(unsaid(text, set())) == old


def words_of(picture: str) -> tuple[str, list[str]]:
    """The names and the lines that a picture in docs/ shows."""
    digest, names, _, *lines = (DOCS / f"{picture}.txt").read_text(encoding="utf-8").splitlines()
    shown = hashlib.sha256((DOCS / f"{picture}.png").read_bytes()).hexdigest()
    assert digest == f"sha256 of {picture}.png: {shown}", "words of another picture"
    return names, lines


def unsaid_in_chinese(line: str) -> str:
    """The Chinese characters of a line that are in no text of the report."""
    told = [chinese for _, chinese in words._entries().values()]
    pieces = {piece.strip(" .,;:()，。；：（）、") for text in told for piece in re.split(r"\{[^}]*\}", text)}
    for piece in sorted(pieces - {""}, key=len, reverse=True):
        line = line.replace(piece, " ")
    return "".join(re.findall(r"[\u4e00-\u9fff]", line))


def test_the_chinese_picture_shows_what_a_report_says_in_chinese():
    assert unsaid_in_chinese("此行结果不可信：这句话没有任何地方说过")
    _, lines = words_of("report.zh")
    assert sum(bool(re.search(r"[\u4e00-\u9fff]", line)) for line in lines) > 10
    gone = {line: left for line in lines if (left := unsaid_in_chinese(line))}
    assert not gone, "make pictures, after a quiet make bench"


def test_the_picture_of_a_report_shows_what_a_report_says():
    names, lines = words_of("report")
    gone = {line: left for line in lines if (left := unsaid(line, set(re.findall(r"\w+", names))))}
    assert not gone, "make pictures, after a quiet make bench"


def test_the_recorded_terminal_shows_what_the_product_says():
    text = (DOCS / "terminal.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    # A terminal folds a sentence, which is joined again.
    said = re.sub(r"[\s│┃]+", " ", re.sub(r"\S*/\S*|[━┏┳┓┡╇┩└┴┘─█╺]+", " ", "\n".join(blocks)))
    assert not unsaid(said, set()), "make pictures"


@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_the_readme_has_the_answer_of_its_picture_in_words(readme):
    (answer,) = re.findall(r"```text\n(.*?)```", (PROJECT / readme).read_text(encoding="utf-8"), flags=re.DOTALL)
    _, shown = words_of("report")
    assert "\n".join(shown).count(answer.strip()) == 1
