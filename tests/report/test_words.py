"""The report's words: in both languages, with the same names filled in, and no key twice."""

import re
from collections import Counter

import pytest
import yaml

from lockstep.report import words

TEXTS = [file.read_text(encoding="utf-8") for file in words.files()]
ENTRIES = {key: texts for text in TEXTS for key, texts in yaml.safe_load(text).items()}


@pytest.mark.parametrize("key", ENTRIES)
def test_every_text_is_there_in_every_language(key):
    texts = ENTRIES[key]
    assert len(texts) == len(words.LANGUAGES)
    names = [Counter(re.findall(r"\{(\w+)\}", text)) for text in texts]
    assert names[0] == names[1]
    assert all(text.strip() for text in texts)


def test_no_key_stands_twice():
    keys = [key for text in TEXTS for key in re.findall(r"^([\w-]+):", text, re.MULTILINE)]
    assert Counter(keys) == Counter(ENTRIES.keys())


def test_ratios_are_never_times_slower():
    for english, chinese in ENTRIES.values():
        assert "times slower" not in english
        assert not re.search(r"[慢少]\s*\{?\w*\}?\s*倍", chinese)


def test_a_listing_reads_as_one_would_say_it():
    assert words.listing(["a"]) == words.Text("a", "a")
    assert words.listing(["a", "b", "c"]) == words.Text("a, b and c", "a、b 和 c")
