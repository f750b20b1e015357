"""The embedded synthetic corpus: Chinese micro-blog-like texts in six emotions, made by rule, for a first run.

It is no evidence about language. It is hard enough that a model has to learn (cues of other emotions that are taken
back, texts without a cue, wrong labels) and easy enough that a small one does: a linear model over characters reaches
about 0.7.
"""

import re
from collections.abc import Iterator
from functools import cache

import numpy as np
import yaml

from lockstep.paths import PROJECT

LEXICON = PROJECT / "resources" / "corpus.yaml"
SIZE = 5000  # texts; the shortest repeat and fall to the removal of duplicates, more than 4,000 stay
LABEL_NOISE = 0.08  # share of texts whose label is replaced by another
NO_CUE = 0.18  # share of texts that don't show their emotion
MISLEADING = 0.30  # share of texts with a cue of another emotion, taken back
# Lengths in characters: log-normal with the real data's median of 13 and mean of 18, which puts 90 % under 37.
LENGTH_MEDIAN, LENGTH_SIGMA, LENGTH_RANGE = 13, 0.807, (1, 133)
SHORT = 5  # characters up to which a text is one short word of its emotion


@cache
def lexicon() -> dict:
    return yaml.safe_load(LEXICON.read_text(encoding="utf-8"))


def generate(seed: int, size: int = SIZE) -> Iterator[dict[str, str]]:
    """Yield `size` texts as {"text": ..., "label": the emotion's name}; the same ones for the same seed."""
    random = np.random.default_rng(seed)
    emotions, shares = zip(*lexicon()["shares"].items(), strict=True)
    for _ in range(size):
        emotion = emotions[random.choice(len(emotions), p=shares)]
        yield {"text": _text(emotion, random), "label": _noisy(emotion, random)}


def _noisy(emotion: str, random: np.random.Generator) -> str:
    if random.random() >= LABEL_NOISE:
        return emotion
    return _pick([other for other in lexicon()["shares"] if other != emotion], random)


def _text(emotion: str, random: np.random.Generator) -> str:
    words = lexicon()
    length = int(np.clip(random.lognormal(np.log(LENGTH_MEDIAN), LENGTH_SIGMA), *LENGTH_RANGE))
    if length <= SHORT:
        return _pick(words["short"][emotion], random) + _pick(words["ends"], random)
    decoration = _decoration(emotion, random)
    clauses = []
    if random.random() >= NO_CUE:
        clauses.append(_fill(_pick(words["cues"][emotion], random), random))
    if random.random() < MISLEADING and length > LENGTH_MEDIAN:
        other = _pick([name for name in words["cues"] if name != emotion], random)
        taken_back = _pick(words["misleading"], random).replace("{cue}", _pick(words["cues"][other], random))
        clauses.append(_fill(taken_back, random))
    while (room := length - len(decoration) - sum(len(clause) + 1 for clause in clauses)) > 1:
        pool = words["cues"][emotion] if clauses and random.random() < 0.15 else words["neutral"]
        clauses.append(_fill(_pick(pool, random), random))
        if len(clauses[-1]) > room + 2:  # too long for what is left of the text
            if len(clauses) > 1:
                clauses.pop()
            break
    random.shuffle(clauses)
    text = "".join(clause + _pick(words["ends"], random) for clause in clauses) + decoration
    return text[: LENGTH_RANGE[1]]


def _decoration(emotion: str, random: np.random.Generator) -> str:
    """Now and then a sign of the emotion, a sign of any, a mention, or a tag."""
    words = lexicon()
    match random.choice(5, p=[0.10, 0.08, 0.07, 0.05, 0.70]):
        case 0:
            return _pick(words["signs"][emotion], random) * int(random.integers(1, 3))
        case 1:
            return _pick(words["signs"][_pick(list(words["signs"]), random)], random)
        case 2:
            return f"@{_pick(words['words']['name'], random)}"
        case 3:
            return f"#{_pick(words['words']['tag'], random)}#"
        case _:
            return ""


def _fill(template: str, random: np.random.Generator) -> str:
    return re.sub(r"{(\w+)}", lambda match: _pick(lexicon()["words"][match[1]], random), template)


def _pick(items: list, random: np.random.Generator):
    return items[random.integers(len(items))]
