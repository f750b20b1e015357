"""The card: one picture whose caption has what one must know to believe it."""

import re

import pytest
from PIL import Image

from lockstep import paths
from lockstep.files import read_json
from lockstep.report import card


def row(name: str, seconds: float, strategy: str = "ddp", **more) -> dict:
    return {"row": name, "strategy": strategy, "train_seconds": seconds, "speedup": None} | more


def test_the_row_that_all_are_compared_with_is_there_wherever_it_stands():
    fast = [row(f"fast_{n}", n) for n in range(20)]
    single = row("single", 99.0, "single")
    shown = card._shown([*fast, single])
    assert [each["row"] for each in shown] == [*(f"fast_{n}" for n in range(card.MOST - 1)), "single"]
    assert card._shown(fast) == fast[: card.MOST]
    assert card._shown([single, *fast[:3]]) == [single, *fast[:3]]


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ({"speedup": 1.5, "speedup_low": 1.41, "speedup_high": 1.6}, "1.50x (1.41 to 1.60)"),
        ({"speedup": 1.5, "speedup_low": None, "speedup_high": None}, "1.50x"),
        ({"speedup": None}, ""),
        ({"speedup": 1.0, "speedup_low": 1.0, "speedup_high": 1.0, "strategy": "single"}, "1.00x"),
        ({"speedup": 1.0, "strategy": "single"}, ""),
    ],
)
def test_what_a_row_gains_is_said_with_its_interval(known, said):
    assert card._gain(row("ddp", 1.0, **known)) == said


def test_a_long_text_ends_in_an_ellipsis():
    text = card._wrapped("words " * 100, 40, 2)
    assert text.count("\n") == 1
    assert text.endswith("…")
    assert card._wrapped("short", 40, 2) == "short"


def test_it_is_of_the_size_that_previews_have_and_says_its_conditions(benchmark):
    folder = paths.report_folder(benchmark.path("results"))
    with Image.open(folder / paths.PLOTS / "card.png") as picture:
        assert picture.size == (1200, 630)
    svg = (folder / paths.PLOTS / "card.svg").read_text(encoding="utf-8")
    text = " ".join(re.findall(r">([^<>]+)</text>", svg))
    report = read_json(folder / paths.SUMMARY)
    assert report["environment"]["cpu"].split()[0] in text
    assert "global batch 31" in text
    assert "single" in text
    assert re.search(r"\d+ of \d+ runs undisturbed", text)
