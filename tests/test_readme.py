"""The READMEs, and the guide's pages that tell how to use Lockstep: in both languages their commands are the same and
work, and the files they name exist.

Commands are run as printed where that is quick; those that train, as a dry run; those of Docker without it.
"""

import itertools
import json
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from lockstep import paths
from lockstep.config import containers, registry
from lockstep.records import packing
from tests.conftest import PROJECT, Workplace
from tests.proof.test_fairness import results  # noqa: F401 - a fixture, as is the next
from tests.test_engines import answers
from tests.test_record import folder  # noqa: F401

ENGLISH, CHINESE = PROJECT / "README.md", PROJECT / "README.zh-CN.md"
GUIDE = [
    PROJECT / "docs" / "guide" / f"{page}.md"
    for page in ("running", "own", "results", "containers", "elsewhere", "recipes", "large")
]
PAGES = [(ENGLISH, CHINESE), *((page, page.with_suffix(".zh.md")) for page in GUIDE)]
EVERY_PAGE = sorted(file for file in GUIDE[0].parent.glob("*.md") if not file.name.endswith(".zh.md"))
TRANSLATED = [(ENGLISH, CHINESE), *((page, page.with_suffix(".zh.md")) for page in EVERY_PAGE)]
PROGRAMS = ("make", "snakemake", "python", "lockstep", "docker", "source", "export")


def blocks(text: str) -> list[str]:
    """What stands in the indented blocks, without the remarks beside it."""
    lines = re.findall(r"^    (\S.*)$", text, re.MULTILINE)
    return [re.split(r"\s+#\s|\s{3,}", line)[0].strip() for line in lines]


def commands(file: Path) -> list[str]:
    """Every command that a page names, in its blocks or within a sentence."""
    text = file.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    within = re.findall(r"`((?:make|snakemake|python|docker|lockstep) [^`]+)`", prose)
    return [line for line in blocks(text) if line.split()[0] in PROGRAMS] + list(dict.fromkeys(within))


def content(text: str) -> dict:
    """What a page and its translation have in common: the kinds of its paragraphs, list items, links, code and figures.

    Figures are numbers of two digits or with a fraction; smaller ones may be words. Months are numbers in Chinese.
    """
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    paragraphs = [paragraph for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]
    kinds = [re.match(r"#+ |\||    |\s*(?:- |\d+\. )|", paragraph)[0].strip("0123456789 ") for paragraph in paragraphs]
    links = [re.sub(r"\.zh(?=\.\w+$)|\.zh-CN", "", link) for link in re.findall(r"\]\(([^)#\s]+)", text)]
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)|^    .*$|\d+ 月", "", text, flags=re.MULTILINE)
    return {
        "paragraphs": kinds,
        "items": len(re.findall(r"^\s*(?:- |\d+\. )", text, re.MULTILINE)),
        "table lines": len(re.findall(r"^\|", text, re.MULTILINE)),
        "links": sorted(links),
        "code": {" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)},
        "figures": {figure.lstrip("0") for figure in re.findall(r"\d*\.\d+|\d{2,}", prose)},
    }


@pytest.mark.parametrize(("english", "chinese"), TRANSLATED, ids=lambda page: page.name)
def test_a_translation_has_the_same_content(english, chinese):
    ours, theirs = (content(page.read_text(encoding="utf-8")) for page in (english, chinese))
    assert ours["links"]
    assert theirs == ours


@pytest.mark.parametrize(
    ("old", "new", "missing"),
    [
        ("\n## ", "\nOne more paragraph.\n\n## ", "paragraphs"),
        ("| `ddp` |", "| `ddp` |\n| `ddp` |", "table lines"),
        ("- one\n", "- one\n- two\n", "items"),
        ("`make quick`", "`make bench`", "code"),
        ("90 seconds", "91 seconds", "figures"),
        ("1.5 times", "2.5 times", "figures"),
        ("(docs/a.md)", "(docs/b.md)", "links"),
    ],
)
def test_what_a_translation_lacks_is_found(old, new, missing):
    """Negative control: each kind of change to a page that its translation does not follow."""
    page = (
        "# A\n\n[text](docs/a.md)\n\n- one\n\n## B\n\n| `ddp` |\n\n`make quick` takes 90 seconds, 1.5 times as long.\n"
    )
    assert old in page
    before, after = content(page), content(page.replace(old, new, 1))
    assert [kind for kind in before if before[kind] != after[kind]] == [missing]


def all_commands() -> list[str]:
    """Every command of the README and of the guide's pages beside it, once."""
    return list(dict.fromkeys(command for page, _ in PAGES for command in commands(page)))


@pytest.mark.parametrize(("english", "chinese"), PAGES, ids=lambda page: page.name)
def test_both_show_the_same_commands(english, chinese):
    assert blocks(chinese.read_text(encoding="utf-8")) == blocks(english.read_text(encoding="utf-8"))
    assert set(commands(chinese)) == set(commands(english))


def test_the_readme_is_read_in_a_minute():
    assert len(ENGLISH.read_text(encoding="utf-8").splitlines()) <= 90
    assert len(all_commands()) >= 75  # most of which stand in the guide


def test_the_dev_container_is_the_bare_machine_that_the_readme_asks_for():
    container = json.loads((PROJECT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    (packages,) = re.findall(r"^    sudo apt install (.+)$", ENGLISH.read_text(encoding="utf-8"), re.MULTILINE)
    assert container["onCreateCommand"].endswith(f" ca-certificates {packages}")
    assert f"ARG BASE={container['image']}\n" in (PROJECT / "docker" / "Dockerfile").read_text(encoding="utf-8")


@pytest.mark.parametrize("file", [page for pair in PAGES for page in pair], ids=lambda page: page.name)
def test_what_they_link_to_is_there(file):
    text = file.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#\s]+)", text)
    assert len(links) + text.count("](#") == text.count("](") > 0  # the expression finds every link
    for link in links:
        assert link.startswith("http") or (file.parent / link).exists(), link
    for script in re.findall(r"workflow/scripts/\w+\.py", text):
        assert (PROJECT / script).is_file(), script


@pytest.fixture(scope="module")
def place(benchmark, tmp_path_factory) -> Workplace:
    """The benchmark's folder as a user has it: what was trained is its default; the files that are named exist."""
    copy = tmp_path_factory.mktemp("readme") / "project"
    place = Workplace(Path(shutil.copytree(benchmark.folder, copy)))
    asked = yaml.safe_load(place.path("results/config.yaml").read_text(encoding="utf-8"))
    asked["rows"] |= {"exploding": None}
    place.path("config/config.yaml").write_text(yaml.safe_dump(asked, allow_unicode=True), encoding="utf-8")
    place.path("mine.yaml").write_text("train: {epochs: 1}\n", encoding="utf-8")
    place.path("my.csv").write_text("text,label\n" + "".join(f"t{n},{('bad', 'good')[n % 2]}\n" for n in range(99)))
    shutil.copy(PROJECT / "docs" / "guide" / "snippets" / "my_text_model.py", place.folder)
    place.path("my.txt").write_text("A text.\n\nAnother one.\n")
    shape = {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    shape |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True}
    place.path("llama.yaml").write_text(yaml.safe_dump(shape), encoding="utf-8")
    (qwen,) = re.findall(
        r"```yaml\n(model_type: qwen2\n.*?)```", (PROJECT / "docs/guide/large.md").read_text(), re.DOTALL
    )
    place.path("qwen.yaml").write_text(qwen, encoding="utf-8")
    place.path("my-cluster.yaml").write_text("card: a100-80gb\ngpus_per_machine: 4\nprice: 1.8\n", encoding="utf-8")
    place.path("my.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    for copy in ("other", "history/v1", "quick"):
        shutil.copytree(place.path("results"), place.path(copy))
    place.path("quick").rename(place.path("results/quick"))
    # A model that something else trained, whose classes are those of my.csv, and its weights.
    theirs = Path(shutil.copytree(place.path("results/runs/ddp/n2/rep1/model"), place.path("FOLDER")))
    about = json.loads((theirs / "config.json").read_text(encoding="utf-8"))
    names = ["bad", "good", *map(str, range(2, len(about["id2label"])))]
    about |= {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
    (theirs / "config.json").write_text(json.dumps(about), encoding="utf-8")
    (theirs / "manifest.json").unlink()
    torch.save(load_file(theirs / "model.safetensors"), place.path("their.pt"))
    return place


def run(place: Workplace, words: list[str]) -> None:
    """Run a command of a README, or what of it can be run here and soon. Fails where it does not work as printed."""
    program, *rest = words
    if program == "make":
        check(place.run("make", "-n", *rest))
    elif program == "snakemake" and not {"--report", "--unlock", "--lint"} & set(rest):
        finished = place.run(*words, "-n")
        if "--use-singularity" in rest:  # a copy of the project has no images
            check(finished, 2)
            installed = shutil.which("apptainer") or shutil.which("singularity")
            assert ("Build it with make sif" if installed else "Apptainer is not installed") in finished.stderr
        else:
            check(finished)
    elif "benchmarks.foretold" in rest:  # it takes an hour
        check(place.run(*words, "--help"))
    elif program in ("snakemake", "python"):
        if "--resume" in rest:
            leave_a_state(place)
        check(place.run(*words))
        if "--resume" in rest:
            check(place.script("launch", "--row", "ddp"))
        if "launch.py" in rest[0]:  # which took away the test of the run before, and the report shows one
            check(place.script("evaluate", "results/runs/ddp/n2/rep1"))
    elif words[:2] == ["docker", "compose"]:
        in_compose(place, rest[1:])
    elif words[:2] == ["docker", "run"]:
        name, _, tag = rest[-1].removeprefix("lockstep/").partition(":")
        assert name in {containers.family(strategy) for strategy in registry.names()}
        assert tag in ("cpu", "cuda")
    elif words == ["lockstep", "accept"]:  # it would take eight minutes; here its time is up after preparing
        finished = place.script("command", "accept", "--minutes=0.001")
        check(finished, 1)
        assert "nothing was proven" in finished.stdout
    elif words[:2] == ["lockstep", "fits"]:  # in a sentence without what it needs; one row tells as much as all
        check(place.script("command", *rest, *(["--rows", "ddp"] if rest[1:] else ["--help"])))
    elif words == ["lockstep", "which"]:  # likewise
        check(place.script("command", "which", "--help"))
    elif words == ["lockstep", "which", "--seal"]:  # nothing can be foretold of rows that have run here
        finished = place.script("command", *rest)
        check(finished, 2)
        assert "have run in results already" in finished.stderr
    elif words[:2] == ["lockstep", "which"] and "--model" not in rest:  # one row tells as much as all
        check(place.script("command", *rest, "--rows", "ddp"))
    elif words == ["lockstep", "network"]:  # smaller messages are as slow to a reader, and quicker
        check(place.script("command", "network", "--largest=1"))
    elif program == "lockstep":
        check(place.script("command", *rest))
    elif program == "source":
        assert f"VENV ?= {rest[0].split('/')[0]}\n" in place.path("Makefile").read_text(encoding="utf-8")
    else:
        assert program == "export"
        check(place.run("bash", "-c", shlex.join(words)))


def leave_a_state(place: Workplace) -> None:
    """As a run of `ddp` does that is killed once it has saved one."""
    command = ["python", "workflow/scripts/launch.py", "--row", "ddp", "--set", "train.checkpoint_every=1"]
    with subprocess.Popen(command, cwd=place.folder, env=place.environment()) as process:
        while not paths.saved_states(place.path("results/runs/ddp/n2/rep1")):
            assert process.poll() is None
            time.sleep(0.005)
        process.kill()


def in_compose(place: Workplace, words: list[str]) -> None:
    """What a service of compose.yaml would run, run here."""
    files = []
    while words[0] == "-f":
        files.append(words[1])
        words = words[2:]
    files = files or ["compose.yaml"]
    if shutil.which("docker") and answers("docker", "compose", "version"):  # some have Docker without Compose
        images = {f"LOCKSTEP_BENCH_{variant}": "lockstep/bench" for variant in ("CPU", "CUDA")}  # as `make images` says
        command = ["docker", "compose", *(f"--file={file}" for file in files), "config", "--quiet"]
        check(place.run(*command, **images))
    if words[0] == "down":
        return
    words = [word for word in itertools.takewhile(lambda word: word != "<", words) if word != "-d"]
    assert words[:2] == ["run", "--rm"]
    service, *rest = words[2:]
    entry = yaml.safe_load(place.path(files[0]).read_text(encoding="utf-8"))["services"][service]["entrypoint"]
    assert entry[:2] == ["bash", "docker/entry.sh"]
    command = [*entry[2:], *rest]
    if "pytest" in command:
        command = [*command, "--collect-only", "--quiet", "tests/report/test_words.py"]
    elif "again.py" in command[1]:
        command.append("--help")
    run(place, command)


def check(finished, *codes: int) -> None:
    said = finished.stdout + finished.stderr
    assert finished.returncode in (codes or (0,)), said
    assert "Traceback" not in said


def trains_again(command: str) -> bool:
    """Whether it trains a row as another command does, and something besides."""
    return "--resume" in command or "log_to" in command


def judges(command: str) -> bool:
    """Whether it judges finished results, with an exit code that says how."""
    return re.search(r"scripts/(check|compare)\.py|lockstep (compare |record |check\b)", command) is not None


@pytest.mark.parametrize("command", list(filter(judges, all_commands())))
def test_fair_results_pass_and_those_with_a_failed_row_do_not(command, place, folder, tmp_path):  # noqa: F811
    for copy in ("other", "history/v1", "quick"):
        shutil.copytree(folder, tmp_path / copy)
    (tmp_path / "quick").rename(folder / "quick")
    (tmp_path / "workflow").symlink_to(place.path("workflow"))
    words = shlex.split(command.replace("lockstep ", "python workflow/scripts/command.py "))
    if "record check" in command:
        for here in (tmp_path, place.folder):
            (here / words[4]).write_bytes(packing.pack(here / "results").content)
    passed = subprocess.run(words, cwd=tmp_path, env=place.environment(), capture_output=True, text=True, check=False)
    check(passed, 0)
    refused = place.run(*words)
    check(refused, 1 if re.search(r"check\b", command) else 2)
    # A record has no file of a run that failed, but its journal knows that it was asked for.
    said = "no run of it has a record" if "record check" in command else "it failed"
    assert said in refused.stdout + refused.stderr


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[pytest.mark.slow] if trains_again(command) else [])
        for command in all_commands()
        if not judges(command)
    ],
)
def test_every_command_works_as_printed(place, command):
    if "--report" in command:
        place.path("report.zip").unlink(missing_ok=True)
    if command.startswith("lockstep keep "):
        shutil.rmtree(place.path("history") / command.split()[2], ignore_errors=True)
    run(place, shlex.split(command))
    if "--report" in command:
        assert place.path("report.zip").is_file()


def test_a_lock_is_taken_away_without_more_words(place):
    """As Snakemake itself says after it was killed."""
    locks = place.path(".snakemake/locks")
    locks.mkdir(parents=True, exist_ok=True)
    (locks / "0.output.lock").write_text("results/report/report.html\n")
    check(place.run("snakemake", "--unlock"))
    assert not list(locks.glob("*"))
