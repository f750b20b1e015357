"""The report's words: in both languages, with the same names filled in, and no key twice."""

import ast
import re
from collections import Counter
from functools import cache

import pytest
import yaml

from lockstep import paths
from lockstep.report import words

TEXTS = [file.read_text(encoding="utf-8") for file in words.files()]
ENTRIES = {key: texts for text in TEXTS for key, texts in yaml.safe_load(text).items()}


@pytest.mark.parametrize("key", ENTRIES)
def test_every_text_is_there_in_every_language(key):
    texts = ENTRIES[key]
    assert len(texts) == len(words.LANGUAGES)
    names = [Counter(re.findall(r"\{(\w+)\}", text)) for text in texts]
    assert names[0] - Counter(unit=1) == names[1] - Counter(unit=1)  # a Chinese sample needs no word for its kind
    assert all(text.strip() for text in texts)


def test_every_key_that_is_written_out_has_a_text():
    """Else a page shows the key itself, as it does for a new column, and nobody notices."""
    files = [*(paths.WORKFLOW / "report").glob("*.j2"), *paths.SCRIPTS.rglob("*.py")]
    written = {
        key
        for file in files
        for key in re.findall(r"\b(?:t|say)\(\s*\"(\w+)\"\s*[,)]", file.read_text(encoding="utf-8"))
    }
    assert len(written) > 100
    assert written - ENTRIES.keys() == set()


def test_no_key_stands_twice():
    keys = [key for text in TEXTS for key in re.findall(r"^([\w-]+):", text, re.MULTILINE)]
    assert Counter(keys) == Counter(ENTRIES.keys())


def test_ratios_are_never_times_slower():
    for english, chinese in ENTRIES.values():
        assert "times slower" not in english
        assert not re.search(r"[慢少]\s*\{?\w*\}?\s*倍", chinese)


def test_a_note_that_has_the_form_of_a_text_is_told_in_every_language():
    told = words.note("3 of the removed duplicates have another label than the text that they repeat")
    assert told.zh == "在删去的重复样本中，有 3 条的标签与先出现的样本不同"
    assert words.note("it trains in bf16") == words.Text("it trains in bf16", "它以 bf16 训练")
    for unknown in ("", "a note of a strategy of yours", "it trains in bf16, and more\n"):
        assert words.note(unknown).en == unknown


@pytest.mark.parametrize("key", [key for key in ENTRIES if key.startswith("note_")])
def test_every_note_of_the_words_is_one_that_the_code_makes(key):
    assert re.sub(r"\{\w+\}", "{}", ENTRIES[key][0]) in made_by_the_code()


@cache
def made_by_the_code() -> set[str]:
    """All strings in the code, with {} in place of each value."""
    made = set()
    for file in paths.SCRIPTS.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                made.add("".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                made.add(node.value)
    return made


def test_a_listing_reads_as_one_would_say_it():
    assert words.listing(["a"]) == words.Text("a", "a")
    assert words.listing(["a", "b", "c"]) == words.Text("a, b and c", "a、b 和 c")
