"""The embedded corpus is neither trivial nor noise, and its texts are as long as those of micro-blogs."""

from collections import Counter

import numpy as np
import pytest
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

from lockstep.data import corpus


@pytest.fixture(scope="module")
def rows():
    return list(corpus.generate(42))


def test_it_is_the_same_for_the_same_seed(rows):
    assert list(corpus.generate(42)) == rows
    assert list(corpus.generate(43)) != rows


def test_it_has_enough_texts_that_differ(rows):
    assert len({row["text"] for row in rows}) >= 4000
    assert Counter(row["label"] for row in rows).keys() == {"其他", "喜好", "悲伤", "厌恶", "愤怒", "高兴"}


def test_its_lengths_are_like_the_real_ones(rows):
    """The published experiment's texts: median 13 and mean 18 characters, 90 % under 37, the longest 133."""
    lengths = np.array([len(row["text"].replace(" ", "")) for row in rows])
    assert 12 <= np.median(lengths) <= 14
    assert 16.5 <= lengths.mean() <= 19.5
    assert 0.88 <= (lengths < 37).mean() <= 0.93
    assert 110 <= lengths.max() <= 133


def test_it_has_emoji_and_mentions(rows):
    text = "".join(row["text"] for row in rows)
    assert text.count("@") > 100
    assert text.count("😂") > 10
    assert len(set(text)) > 480


def test_about_eight_in_a_hundred_labels_are_wrong(monkeypatch):
    def first_labels():
        return np.array([next(corpus.generate(seed))["label"] for seed in range(3000)])

    noisy = first_labels()
    monkeypatch.setattr(corpus, "LABEL_NOISE", 0)
    assert 0.065 <= (noisy != first_labels()).mean() <= 0.095


def test_a_linear_model_over_characters_is_neither_lost_nor_perfect(rows):
    unique = {row["text"]: row["label"] for row in rows}
    train_x, test_x, train_y, test_y = train_test_split(
        list(unique), list(unique.values()), test_size=0.2, random_state=0, stratify=list(unique.values())
    )
    counts = CountVectorizer(analyzer="char")
    model = LogisticRegression(max_iter=1000).fit(counts.fit_transform(train_x), train_y)
    assert 0.60 <= model.score(counts.transform(test_x), test_y) <= 0.85
