"""A study is a folder: another one is found by being there, and of one that is removed nothing is left."""

import shutil

import pytest

from lockstep.config import registry
from lockstep.files import read_json
from lockstep.paths import PACKAGE, STUDIES
from tests.conftest import SMALL, copy_project

STUDY = {
    "study.py": """
def answer(config, rows, timed, verdicts, ratio):
    return {"of_the_study": [row["row"] for row in rows if row["division"] == "rival"]}
def drawings(answered):
    return []
def lines(answered):
    return []
""",
    "words.yaml": 'rival: ["What the rival says", "对手的说法"]\n',
    "section.html.j2": '{% from "parts.html.j2" import section with context %}\n'
    '{% call section("rival") %}of the rival: {{ study.answer.of_the_study|join }}{% endcall %}\n',
    "section.md.j2": "of the rival: {{ study.answer.of_the_study|join }}\n",
    "strategies/_rival.py": """
from lockstep.strategies import single
class Strategy(single.Strategy):
    def backward(self, loss, last):
        print("the rival's habit")
        super().backward(loss, last)
OPTIONS = {"habit": {"type": "boolean", "default": True, "description": "the rival's habit"}}
""",
    "strategies/rival_ddp.py": '''"""rival_ddp: ddp with the rival's habit."""
from lockstep.strategies import _rival, ddp
class Strategy(_rival.Strategy, ddp.Strategy):
    pass
''',
}
ROWS = "  rival: {strategy: rival_ddp}\n"
CONFIGS = ("--config=config/config.yaml", "--config=small.yaml")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A copy of the project with another study in place of its own ones."""
    copy = copy_project(tmp_path_factory.mktemp("plug_in"))
    shutil.rmtree(copy.path("workflow/studies"))
    for name, text in STUDY.items():
        file = copy.path(f"workflow/studies/rival/{name}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    copy.path("small.yaml").write_text(SMALL + ROWS, encoding="utf-8")
    return copy


def test_a_study_is_found_by_its_folder_and_trained_and_reported_apart(place):
    place.prepare(*CONFIGS)
    trained = place.script("launch", *CONFIGS, "--row=rival")
    assert trained.returncode == 0, trained.stderr
    run = place.path("results/runs/rival/n2/rep1")
    assert read_json(run / "record.json")["division"] == "rival"
    assert "the rival's habit" in (run / "run.log").read_text(encoding="utf-8")
    made = place.script("report", *CONFIGS)
    assert made.returncode == 0, made.stderr
    assert read_json(place.path("results/report/summary.json"))["rival"] == {"of_the_study": ["rival"]}
    page = place.path("results/report/report.html").read_text(encoding="utf-8")
    assert "of the rival: rival" in page
    assert "What the rival says" in page
    shown = place.script("show", *CONFIGS, "rival")
    assert "# rival: rival_ddp, in workflow/studies/rival/strategies/rival_ddp.py\n" in shown.stdout
    assert '+        print("the rival\'s habit")' in shown.stdout


def test_of_a_study_that_is_not_there_nothing_is_left(place):
    refused = place.script("launch", *CONFIGS, "--set=rows.x={strategy: published_ddp}", "--row=x")
    assert refused.returncode == 2
    assert "rows.x.strategy: 'published_ddp' is not one of accelerate, cp, dataparallel, ddp, " in refused.stderr


@pytest.mark.parametrize("study", sorted(file.parent.name for file in STUDIES.glob("*/study.py")))
def test_nothing_but_a_study_names_its_strategies_or_its_division(study):
    names = [name for name in registry.names() if registry.study(name) == study]
    assert names
    assert all(name.startswith(f"{study}_") for name in names), "so that two studies have no file of the same name"
    told = [f'"{study}"', f"'{study}'", *names]
    files = [*PACKAGE.rglob("*.py"), *PACKAGE.parent.glob("*.py")]
    assert not [(str(file), name) for file in files for name in told if name in file.read_text(encoding="utf-8")]
