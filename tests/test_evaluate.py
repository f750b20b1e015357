"""Which repetition's test a run may copy: a test that other code made must not survive."""

import pytest
import torch
import transformers

import evaluate
from lockstep import evaluation, files, paths
from tests import made


@pytest.fixture
def repetition(tmp_path):
    """Makes a tested repetition of a row, with these weights and settings."""

    def make(repeat: int, weights: str = "same", **settings):
        run = tmp_path / paths.run_name("ddp", 2, repeat)
        (run / paths.MODEL).mkdir(parents=True)
        files.seal(run / paths.MODEL, {"weights": weights})
        (run / paths.CHECKPOINT).mkdir()
        files.seal(run / paths.CHECKPOINT, {"weights": weights})
        files.write_json(run / paths.SETTINGS, {"task": "text-classification", "options": {}} | settings)
        files.write_json(run / paths.RECORD, made.raw(repeat=repeat))
        files.write_json(run / paths.TEST_REPORT, {"repeat": repeat})
        return run

    return make


def test_later_repetitions_copy_the_test_of_the_first_one_and_it_copies_none(repetition):
    """When the code of a test changes, all are tested again: the first would copy a test of the code before."""
    first, second, third = map(repetition, (1, 2, 3))
    assert [evaluate.tested_twin(run) for run in (first, second, third)] == [None, first, first]
    (first / paths.TEST_REPORT).unlink()
    assert [evaluate.tested_twin(run) for run in (second, third)] == [None, None]


@pytest.mark.parametrize(
    "other", [{"weights": "other"}, {"task": "language-modelling"}, {"options": {"count_each_rank": True}}]
)
def test_a_test_is_not_copied_where_anything_else_decided_it(repetition, other):
    repetition(1)
    assert evaluate.tested_twin(repetition(2, **other)) is None


def test_a_run_that_has_not_ended_copies_no_test(repetition):
    repetition(1)
    second = repetition(2)
    (second / paths.RECORD).unlink()
    assert evaluate.tested_twin(second) is None


def test_a_model_is_tested_in_fp32_where_matrices_are_multiplied_in_tf32_else(tmp_path):
    """As in NVIDIA's images, by a variable; and PyTorch itself computes convolutions so."""
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    transformers.BertForSequenceClassification(transformers.BertConfig(**shape)).save_pretrained(tmp_path)
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    try:
        evaluation.load_model(tmp_path)
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("highest", False)
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
