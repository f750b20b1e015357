"""Texts that contain names of special tokens, and text that a tokenizer does not know."""

import pytest

from lockstep.data import vocabulary
from lockstep.model import decoders, encoders
from tests.model.test_heads import BERTS, TEXTS, tokenizer_of

MARKED = ["a [SEP] b", "<s>old price</s> now less", "[PAD] [CLS] [UNK]", "⟨s⟩ ⟨/s⟩ ⟨pad⟩"]


def test_to_lockstep_s_own_tokenizers_a_text_is_letters():
    """Otherwise a document could end early, and a text could contain padding."""
    characters = encoders.character_tokenizer(["".join(MARKED)] * 2, 64)
    for text in MARKED:
        ids = characters(text)["input_ids"]
        assert min(ids[1:-1]) >= len(encoders.SPECIAL)
        assert len(ids) == len(text.replace(" ", "")) + 2
    pairs = decoders.byte_pairs(MARKED, 64)
    for text in MARKED:
        ids = pairs(text, add_special_tokens=False)["input_ids"]
        assert min(ids) >= 3
        assert pairs.decode(ids) == text


def test_no_mark_is_learnt_from_texts_that_are_full_of_it():
    """A token learnt from the letters of a special token's name would be that special token."""
    pairs = decoders.byte_pairs([mark * 9 for mark in ("<s>", "</s>", "<pad>", "⟨s⟩", "⟨/s⟩", "⟨pad⟩")] * 50, 64)
    marks = pairs.convert_tokens_to_ids([decoders.PAD, decoders.BEGIN, decoders.END])
    assert marks == [0, 1, 2]
    for mark in ("<s>", "</s>", "<pad>", "⟨s⟩", "⟨/s⟩", "⟨pad⟩"):
        assert not {0, 1, 2} & set(pairs(mark)["input_ids"])


def test_such_a_tokenizer_stays_so_when_it_is_stored(tmp_path):
    from lockstep.model import models

    for number, tokenizer in enumerate((encoders.character_tokenizer(MARKED * 2, 64), decoders.byte_pairs(MARKED, 64))):
        tokenizer.save_pretrained(tmp_path / str(number))
        again = models.tokenizer(tmp_path / str(number))
        assert all(again(text)["input_ids"] == tokenizer(text)["input_ids"] for text in MARKED)


def test_texts_that_are_cut_are_counted(tmp_path):
    tokenizer = tokenizer_of(tmp_path, **BERTS)
    tokenizer.model_max_length = 5  # two of them begin and end a text
    texts = ["bad day", "good bad day", "good bad day good", "day " * 50]
    remarks = vocabulary.Remarks(tokenizer)
    remarks.add_cut(texts, tokenizer(texts, truncation=True)["input_ids"])
    assert remarks.notes() == ["2 of 4 texts have more than 5 tokens (data.max_length), and are truncated"]


@pytest.mark.parametrize(
    ("texts", "note"),
    [
        (TEXTS, None),
        (
            [*TEXTS, "bad [SEP] day", "good [PAD]", "[SEP] [SEP]"],
            "3 texts contain [SEP], [PAD], which the tokenizer reads",
        ),
        ([*TEXTS, "xx yy zz bad"], "% of all tokens are [UNK], which stands for what the tokenizer does not know"),
    ],
)
def test_what_a_pretrained_tokenizer_makes_of_texts_is_told(tmp_path, texts, note):
    tokenizer = tokenizer_of(tmp_path, **BERTS)
    remarks = vocabulary.Remarks(tokenizer)
    remarks.add(texts, tokenizer(texts)["input_ids"])
    if note is None:
        assert remarks.notes() == []
    else:
        assert len(remarks.notes()) == 1
        assert note in remarks.notes()[0]
