"""Normalise labels by one rule for every file format, so that the same data has the same classes in each of them."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation

from lockstep.errors import BadInput, listed, shortened

# What programs write for a missing value (pandas, R, SQL, spreadsheets, Python, JavaScript, UCI's data sets).
MISSING = {"", "-", "--", "?", "nan", "-nan", "none", "null", "nil", "na", "n/a", "#n/a", "#na", "<na>", "\\n", "nat"}
MISSING |= {
    "undefined",
    "missing",
    "(null)",
    "[null]",
    "<null>",
    "<none>",
    "(blank)",
    "n.a.",
    "n.a",
    "n/a.",
    "..",
    "...",
    "??",
}
MISSING |= {"#n/a n/a", "1.#qnan", "1.#ind", "-1.#ind", "nan(ind)", "-nan(ind)", "na_character_", "pd.na", "[]", "{}"}
MISSING |= {".", "''", "---", "\\\\n", "#value!", "#ref!", "#div/0!", "#name?", "#num!", "#null!"}
DASHES = re.compile("[\u2010-\u2015\u2212\ufe58\ufe63\uff0d]")  # hyphens, dashes and the minus sign
# Variants of a character, and letters and blanks without a shape, besides Unicode's formats and controls.
INVISIBLE = {*map(chr, range(0xFE00, 0xFE10)), *"\u180e\u3164\u115f\u1160\uffa0\u2800"}
WHOLE = re.compile(r"([+-]?\d+)\.0*")  # an integer written as a decimal fraction, such as 3.0
ALPHABETS = {"LATIN", "CYRILLIC", "GREEK"}  # some of their letters look alike
NO_TEXT = {"nan", "na", "none", "null", "n/a", "#n/a", "<na>", "nat", "(null)"}  # what few people would write as a text
HALF = re.compile("[\ud800-\udfff]")  # half of a surrogate pair
WAYS = 5  # how many spellings of a label are remembered


class Labels:
    """The distinct labels of a source, numbered from 0 in order of their first occurrence.

    A label is normalised to a string without surrounding blanks, in Unicode's composed form (NFC); integers lose a
    fraction of zeros. A word that means "no value" is refused, unless it is one of `names` (data.labels).
    """

    def __init__(self, names: list[str] | None = None):
        self.expected = {unicodedata.normalize("NFC", name) for name in names or ()}
        self.numbers: dict[str, int] = {}
        self.written: dict[str, set[str]] = {}  # the spellings of each label in the source

    def number(self, value, where: str) -> int:
        """The number of a label as read from the source. Raises BadInput if it is missing or is not a name."""
        name, as_written = self._name(value, where)
        number = self.numbers.setdefault(name, len(self.numbers))
        ways = self.written.setdefault(name, set())
        if len(ways) < WAYS:
            ways.add(as_written)
        return number

    def _name(self, value, where: str) -> tuple[str, str]:
        if value is None or (isinstance(value, float | Decimal) and value != value):  # not a number
            raise BadInput(f"{where}: has no label (it is {value}). {self._how_to_keep(str(value))}")
        if not isinstance(value, str | int | float | Decimal):
            raise BadInput(f"{where}: the label is {shortened(value)}; expected a name or a number.")
        as_written = str(value).strip()
        name = unicodedata.normalize("NFC", as_written)
        if HALF.search(name):
            raise BadInput(f"{where}: the label holds half a character (a lone surrogate). Fix the row.")
        if "".join(_plain(name).split()) in MISSING and name not in self.expected:
            raise BadInput(f"{where}: the label is {name!r}, which means a missing value. {self._how_to_keep(name)}")
        if (whole := WHOLE.fullmatch(name)) and name not in self.expected:
            name = str(int(whole[1])) if len(name) < 20 else whole[1]
        return name, as_written

    def _how_to_keep(self, name: str) -> str:
        if name.strip():
            return f"Remove the row; if {name!r} is a class, name all classes in data.labels."
        return "Remove the row, or label it."

    @property
    def names(self) -> list[str]:
        return list(self.numbers)

    def notes(self, counts: Counter, unit: str) -> list[str]:
        """Notes for the user on different spellings of labels. counts: the number of samples with each label."""
        notes = []
        if several := {name: ways for name, ways in self.written.items() if len(ways) > 1}:
            each = [f"{_all(map(repr, sorted(ways)))} are {name!r}" for name, ways in several.items()]
            notes.append(f"labels in several spellings are taken for one: {listed(each, '; ')}")
        alike: dict[str, list[str]] = {}
        for name in self.numbers:
            alike.setdefault(spelling(name), []).append(name)
        if unlike := [names for names in alike.values() if len(names) > 1]:
            each = [_all(f"{name!r} ({counts[name]} {unit}s)" for name in names) for names in unlike]
            notes.append(
                f"labels that differ only in spelling are separate classes: {listed(each, '; ')}. Write them alike if"
                " one class is meant"
            )
        if mixed := [name for name in self.numbers if any(len(_alphabets(word)) > 1 for word in name.split())]:
            notes.append(f"labels with letters of two alphabets, some of which look alike: {listed(map(repr, mixed))}")
        return notes


def _alphabets(word: str) -> set[str]:
    return {unicodedata.name(letter, " ").split(" ")[0] for letter in word if letter.isalpha()} & ALPHABETS


def is_no_text(text: str) -> bool:
    """Whether a text is a word for a missing value that few people would write as a text."""
    return text.lower() in NO_TEXT


def of_missing_texts(count: int) -> list[str]:
    """The note on texts for which `is_no_text` is true."""
    if not count:
        return []
    return [f"{count} texts are a word for a missing value, such as nan or None: remove them if they are no text"]


def spelling(name: str) -> str:
    """A canonical form that is equal for labels that differ only in spelling.

    It ignores blanks, case, full-width characters (NFKC), leading and trailing zeros, a decimal comma, true versus 1,
    invisible characters, forms of dashes and apostrophes, and hyphens or underscores in place of blanks.
    """
    plain = "".join(_plain(name).split())
    plain = {"true": "1", "false": "0"}.get(plain, plain)
    try:
        number = Decimal(plain.replace(",", "."))
    except InvalidOperation:
        return re.sub("[-_]", "", plain) or plain
    return str(number.normalize() + 0) if number.is_finite() and abs(number.adjusted()) < 50 else plain


def _plain(name: str) -> str:
    """A label in lower case, without invisible characters, and with plain dashes and apostrophes."""
    visible = "".join(
        letter
        for letter in unicodedata.normalize("NFKC", name)
        if letter not in INVISIBLE and (letter.isspace() or unicodedata.category(letter) not in ("Cf", "Cc"))
    )
    return DASHES.sub("-", visible).replace("\u2019", "'").replace("\u2018", "'").casefold().strip()


def in_order(names: Iterable[str]) -> list[str]:
    """Labels sorted as numbers if all are integers, otherwise alphabetically."""
    names = list(names)
    if all(re.fullmatch(r"[+-]?\d{1,18}", name) for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


def position(
    label: str, names: list[str], where: str, how: str = "set data.labels (null takes the labels from the data)"
) -> int:
    """The position of a label among `names`, by name, or by number if no name is a number. Raises BadInput."""
    if label in names:
        return names.index(label)
    numbered = not any(_counts(name) for name in names)
    # int() refuses strings of some thousand digits, so check the length first.
    if numbered and label.isdecimal() and len(label) < 10 and int(label) < len(names):
        return int(label)
    numbers = f" or a number from 0 to {len(names) - 1}" if numbered else ""
    alike = [name for name in names if spelling(name) == spelling(label)]
    meant = f" It differs from {alike[0]} only in spelling." if alike else ""
    raise BadInput(
        f"{where}: label {shortened(label)} is not one of {listed(names)}{numbers}.{meant} Fix the row, or {how}."
    )


def _counts(name: str) -> bool:
    """Whether a name of a class is a number itself, or begins with one: "1", "1.0", "+1", "True", "3 stars"."""
    return re.match(r"[+-]?\d", _plain(name)) is not None or spelling(name) in ("0", "1")


def _all(names: Iterable[str]) -> str:
    return " and ".join(names)
