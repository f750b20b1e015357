"""A figure of quality is one entry: what is said of a test, compared and kept by it follows, also without words."""

import math

import pytest

from lockstep import columns
from lockstep.config import registry, schema
from lockstep.config.qualities import KEPT_BY, QUALITIES, Quality
from lockstep.report import ladder, page
from lockstep.report.words import Text, axis_texts, say
from tests import made


def test_every_task_s_figures_are_declared_and_train_best_takes_them():
    assert set(registry.qualities()) == QUALITIES.keys()
    best = schema.of_configuration()["properties"]["train"]["properties"]["best"]
    assert set(best["enum"]) == KEPT_BY.keys()


@pytest.mark.parametrize(
    ("task", "test", "said"),
    [
        (
            "text-classification",
            {"accuracy": 0.5, "macro_f1": 0.25},
            "accuracy 0.5000, macro-F1 0.2500 on 1,240 samples",
        ),
        (
            "language-modelling",
            {"perplexity": 12.345, "trigram_perplexity": 20.0},
            "perplexity 12.35 on 1,240 tokens; a 3-gram model's is 20.00",
        ),
        (
            "image-segmentation",
            {"pixel_accuracy": 0.75, "miou": 0.5, "images": 3},
            "pixel accuracy 0.7500, mIoU 0.5000 on 1,240 pixels of 3 images",
        ),
    ],
)
def test_a_test_is_told_of_by_its_task_s_figures(task, test, said):
    assert page.test_line(registry.task_literals(task)["QUALITY"], test | {"support": 1240}).en == said


def test_the_best_weights_are_those_of_the_lowest_perplexity_and_of_the_highest_other_figure():
    assert KEPT_BY["perplexity"].score({"perplexity": 3.0}) > KEPT_BY["perplexity"].score({"perplexity": 4.0})
    assert KEPT_BY["loss"].score({"loss": 1.0}) > KEPT_BY["loss"].score({"loss": 2.0})
    assert KEPT_BY["miou"].score({"miou": 0.4}) > KEPT_BY["miou"].score({"miou": 0.3})


def test_a_figure_is_a_column_of_the_table_with_its_digits_and_range():
    assert QUALITIES.keys() <= columns.BY_KEY.keys()
    error_rate = columns.of_quality(Quality("word_error_rate", "tokens", lower_is_better=True, digits=1, most=9))
    runs = [made.run(test={"word_error_rate": rate}) for rate in (0.5, 1.0, 8.0)]
    assert columns.median(error_rate, runs).median == 1.0
    assert (error_rate.digits, error_rate.least, error_rate.most, error_rate.best) == (1, 0, 9, "lowest")
    assert columns.of_quality(Quality("bleu_score", "tokens")).best == "highest"


def test_a_model_has_learnt_where_it_is_above_one_that_has_not():
    texts = {"confusion_matrix": [[60, 0], [40, 0]]}  # naming the first label always: macro-F1 .375, mIoU .3
    assert QUALITIES["macro_f1"].of_nothing(texts) == pytest.approx(0.375)
    assert QUALITIES["miou"].of_nothing(texts) == pytest.approx(0.3)
    for perplexity, learnt in ((19.0, True), (21.0, False)):
        test = {"perplexity": perplexity, "loss": math.log(perplexity), "trigram_perplexity": 20.0}
        assert ladder.learnt([made.run(test=test)], QUALITIES["perplexity"]) == learnt
    assert ladder.learnt([made.run(test={"accuracy": 0.1})], QUALITIES["accuracy"]), "of which nothing is known"


def test_a_figure_without_words_ends_no_page(monkeypatch):
    assert say("bleu_score") == Text("bleu score", "bleu score")
    monkeypatch.setitem(QUALITIES, "bleu_score", Quality("bleu_score", "tokens", ()))
    said = page.test_line(("perplexity", "bleu_score"), {"perplexity": 3, "bleu_score": 0.4, "support": 9})
    assert said.en == "perplexity 3.00, bleu score 0.4000 on 9 tokens"
    assert page.ladder_words("bleu_score")["difference"].en == "bleu score, difference"
    axis_texts.cache_clear()
    assert Text("bleu score on the test split", "测试集 bleu score") in axis_texts()
    axis_texts.cache_clear()
