"""The report's texts in each of its languages, from workflow/report/words.yaml."""

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import yaml

from lockstep import columns
from lockstep.config.qualities import QUALITIES
from lockstep.paths import STUDIES, WORKFLOW

FILE = WORKFLOW / "report" / "words.yaml"
LANGUAGES = ("en", "zh")
LISTED, MANY = 4, 12  # the most names in a sentence, and in a long list
# Templates have blanks around values that may be Latin; they are removed around values in Chinese.
BETWEEN_HAN = re.compile(r"(?<=[\u4e00-\u9fff]) (?=[\u4e00-\u9fff])")


@dataclass(frozen=True)
class Text:
    """A text in every language."""

    en: str
    zh: str

    def __add__(self, other: "Text") -> "Text":
        return Text(self.en + other.en, self.zh + other.zh)


@cache
def _entries() -> dict[str, list[str]]:
    """All texts by key: the report's own, and those of studies (report/studies.py)."""
    entries: dict[str, list[str]] = {}
    for file in files():
        entries |= yaml.safe_load(file.read_text(encoding="utf-8"))
    return entries


def files() -> list[Path]:
    return [FILE, *sorted(STUDIES.glob("*/words.yaml"))]


def say(key: str, **values) -> Text:
    """The text of a key, with `values` (numbers, strings or Texts) in place of their names.

    The text of a column's key is its heading, with the unit. A key without a text, such as that of a new column, is
    shown itself, so that a missing text does not stop the page.
    """
    column = columns.BY_KEY.get(key)
    templates = _entries().get(key) or [key.replace("_", " ")] * len(LANGUAGES)
    english, chinese = (
        template.format(**{name: _in(value, language) for name, value in values.items()})
        for language, template in zip(LANGUAGES, templates, strict=True)
    )
    text = Text(english, BETWEEN_HAN.sub("", chinese))
    return text + same(" ") + _unit(column.unit) if column and column.unit else text


def _unit(unit: str) -> Text:
    return say(f"unit_{unit}") if f"unit_{unit}" in _entries() else same(unit)


def meaning(key: str) -> Text:
    """The meaning of a column of the table; empty if there is no text for it."""
    return say(f"about_{key}") if f"about_{key}" in _entries() else same("")


def same(text: str) -> Text:
    """A text that is the same in every language, such as a name or a number."""
    return Text(text, text)


def note(text: str) -> Text:
    """A note or a reason that was kept in English, in every language if it has the form of a `note_` text."""
    for pattern, key in _notes():
        if match := pattern.fullmatch(text):
            return replace(say(key, **match.groupdict()), en=text)
    return same(text)


@cache
def _notes() -> list[tuple[re.Pattern, str]]:
    """A pattern for each `note_` text, which finds its values, and the text's key."""
    patterns = []
    for key, (english, _) in _entries().items():
        if key.startswith("note_"):
            named = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>.+?)", re.escape(english))
            patterns.append((re.compile(named, re.DOTALL), key))
    return patterns


def listing(names: list[str]) -> Text:
    """a, b and c"""
    *first, last = names
    comma, conjunction = say("comma"), say("and")
    return Text(
        *(
            f"{_in(comma, language).join(first)}{_in(conjunction, language)}{last}" if first else last
            for language in LANGUAGES
        )
    )


def join(texts: list[Text], separator: Text) -> Text:
    return Text(separator.en.join(text.en for text in texts), separator.zh.join(text.zh for text in texts))


def _in(value, language: str) -> str:
    return getattr(value, language) if isinstance(value, Text) else str(value)


@cache
def axis_texts() -> list[Text]:
    """The texts of axes and legends, which are drawn in English, and shown in both languages on the page."""
    texts = [
        say(key)
        for key in _entries()
        if key.startswith(("axis_", "phase_", "setup_", "gain_strong", "gain_weak", "memory_"))
    ]
    return texts + [on_test_split(name) for name in QUALITIES]


def on_test_split(quality: str) -> Text:
    """The text of an axis for a figure of quality."""
    return say("on_test_split", figure=say(quality))


def three(number: float) -> str:
    """A number with three significant digits, and never as 1e+03."""
    return f"{number:.3g}" if abs(number) < 100 else f"{number:.0f}"


def some(names: list[str], most: int = LISTED) -> Text:
    if len(names) <= most + 1:
        return listing(names)
    first = join([same(name) for name in names[:most]], say("comma"))
    return say("some", rows=first, n=len(names) - most)
