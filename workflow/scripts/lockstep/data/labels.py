"""Labels as people write them: one rule for every format, so that the same data gives the same classes from each."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation

from lockstep.errors import BadInput

# By what programs write where there is no value (pandas, R, SQL, spreadsheets, Python, JavaScript, UCI's data sets).
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
    "n/a.",
    "..",
    "...",
    "??",
}
MISSING |= {"#n/a n/a", "1.#qnan", "1.#ind", "-1.#ind", "nan(ind)", "-nan(ind)", "na_character_", "pd.na", "[]", "{}"}
MISSING |= {".", "''", "---", "\\\\n", "#value!", "#ref!", "#div/0!", "#name?", "#num!", "#null!"}
DASHES = re.compile("[\u2010-\u2015\u2212\ufe58\ufe63\uff0d]")  # hyphens, dashes and the minus sign
INVISIBLE = re.compile("[\u00ad\u180e\u200b-\u200f\u2060-\u2064\ufe00-\ufe0f\ufeff]")  # joiners, marks, variants
WHOLE = re.compile(r"([+-]?\d+)\.0*")  # a whole number that some program has written as a fraction
HALF = re.compile("[\ud800-\udfff]")
SHOWN = 10  # labels that a message lists
WAYS = 5  # ways of writing a label that are remembered


class Labels:
    """The different labels of a source, numbered from 0 in the order in which they come.

    A label is a name: a string without blanks around it, in Unicode's composed form (NFC), whole numbers without a
    fraction. A word that means "no value" is refused, unless it is one of `names`, those of data.labels.
    """

    def __init__(self, names: list[str] | None = None):
        self.expected = {unicodedata.normalize("NFC", name) for name in names or ()}
        self.numbers: dict[str, int] = {}
        self.written: dict[str, set[str]] = {}  # of each label, the ways in which it is written

    def number(self, value, where: str) -> int:
        """The number of a label as its source has it. Raises BadInput where there is none, or it is no name."""
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
        if _plain(name) in MISSING and name not in self.expected:
            raise BadInput(f"{where}: the label is {name!r}, which means that there is none. {self._how_to_keep(name)}")
        if (whole := WHOLE.fullmatch(name)) and name not in self.expected:
            name = str(int(whole[1])) if len(name) < 20 else whole[1]
        return name, as_written

    def _how_to_keep(self, name: str) -> str:
        if name.strip():
            return f"Remove the row, or, where {name!r} is a class, name all classes in data.labels."
        return "Remove the row, or label it."

    @property
    def names(self) -> list[str]:
        return list(self.numbers)

    def notes(self, counts: Counter, unit: str) -> list[str]:
        """What a user must know of how labels are written. counts: how many samples have each."""
        notes = []
        if several := {name: ways for name, ways in self.written.items() if len(ways) > 1}:
            each = [f"{_all(map(repr, sorted(ways)))} are {name!r}" for name, ways in several.items()]
            notes.append(f"labels that are written in several ways are one: {listed(each, '; ')}")
        alike: dict[str, list[str]] = {}
        for name in self.numbers:
            alike.setdefault(spelling(name), []).append(name)
        if unlike := [names for names in alike.values() if len(names) > 1]:
            each = [_all(f"{name!r} ({counts[name]} {unit}s)" for name in names) for names in unlike]
            notes.append(
                f"labels that differ in how they are written alone are classes of their own: {listed(each, '; ')}."
                " Write them alike where one is meant"
            )
        return notes


def spelling(name: str) -> str:
    """What two labels have in common that differ in nothing but how they are written.

    Blanks, case, full-width characters (NFKC), zeros before or after a number, a decimal comma, true and 1; characters
    that nobody sees; forms of the dash and of the apostrophe; hyphens and underscores in place of blanks.
    """
    plain = "".join(_plain(name).split())
    plain = {"true": "1", "false": "0"}.get(plain, plain)
    try:
        number = Decimal(plain.replace(",", "."))
    except InvalidOperation:
        return re.sub("[-_]", "", plain) or plain
    return str(number.normalize()) if number.is_finite() and abs(number.adjusted()) < 50 else plain


def _plain(name: str) -> str:
    """A label in plain characters, those that one sees, and small letters."""
    visible = INVISIBLE.sub("", unicodedata.normalize("NFKC", name))
    return DASHES.sub("-", visible).replace("\u2019", "'").replace("\u2018", "'").casefold().strip()


def in_order(names: Iterable[str]) -> list[str]:
    """Labels in the order of their numbers where all are whole numbers, else in that of the alphabet."""
    names = list(names)
    if all(re.fullmatch(r"[+-]?\d{1,18}", name) for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


def position(
    label: str, names: list[str], where: str, how: str = "set data.labels (null takes the labels from the data)"
) -> int:
    """Where a label stands among `names`: by its name, or by its number where no name is one. Raises BadInput."""
    if label in names:
        return names.index(label)
    numbered = not any(name.isdecimal() for name in names)
    # Python refuses to read some thousand digits.
    if numbered and label.isdecimal() and len(label) < 10 and int(label) < len(names):
        return int(label)
    numbers = f" or a number from 0 to {len(names) - 1}" if numbered else ""
    alike = [name for name in names if spelling(name) == spelling(label)]
    meant = f" It differs from {alike[0]} only in how it is written." if alike else ""
    raise BadInput(
        f"{where}: label {shortened(label)} is not one of {listed(names)}{numbers}.{meant} Fix the row, or {how}."
    )


def shortened(value) -> str:
    return repr(value) if len(repr(value)) < 100 else f"{repr(value)[:100]}..."


def listed(names: Iterable[str], separator: str = ", ", most: int = SHOWN) -> str:
    """The first of some names, and how many more there are."""
    names = list(names)
    return separator.join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _all(names: Iterable[str]) -> str:
    return " and ".join(names)
