"""Encoders for text classification: their tokenizers and initial weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from lockstep.errors import BadInput, brief
from lockstep.model import pretrained
from lockstep.model.models import LOCAL

if TYPE_CHECKING:  # a training process needs no configuration, and starts sooner without this import
    from lockstep.config.sections import Model

EXAMPLE = "Lockstep 测试"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def make_tokenizer(model: Model, texts: Iterable[str], max_length: int):
    """The pretrained tokenizer; for a scratch model and a user's own, a tokenizer with one token per character.

    `texts` are those of the training split. Both tokenizers truncate texts to `max_length` tokens.
    """
    from transformers import AutoTokenizer

    if model.name != "scratch" and not model.file:
        with pretrained.explained(model):
            folder = pretrained.folder_of(model, pretrained.SMALL)
            tokenizer = AutoTokenizer.from_pretrained(folder, model_max_length=max_length, **LOCAL)
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise BadInput(f"model.name: {model.name} holds no tokenizer. Save the one it was trained with.")
        return tokenizer
    return character_tokenizer(texts, max_length)


def character_tokenizer(texts: Iterable[str], max_length: int):
    """A tokenizer with one token per character, in lower case and without blanks; frequent characters come first.

    Characters that occur only once in `texts` become [UNK], so that the model is trained on unknown characters, too.
    """
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    counts = Counter(
        character for text in texts for character in normalizer.normalize_str(text) if not character.isspace()
    )
    characters = sorted(
        (character for character, count in counts.items() if count > 1),
        key=lambda character: (-counts[character], character),
    )
    tokenizer = Tokenizer(
        models.WordLevel({token: n for n, token in enumerate(SPECIAL + characters)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex("."), "isolated")]
    )
    tokenizer.post_processor = processors.BertProcessing(
        ("[SEP]", SPECIAL.index("[SEP]")), ("[CLS]", SPECIAL.index("[CLS]"))
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        split_special_tokens=True,  # "[SEP]" in a text is five characters, not the special token
        **dict(zip(names, SPECIAL, strict=True)),
    )


def initialise(
    model: Model,
    tokenizer,
    labels: list[str],
    max_length: int,
    seed: int,
    notes: list[str] | None = None,
    example: str = EXAMPLE,
):
    """The model with its initial weights: a pretrained encoder with a classification head, or all new weights.

    The head of a pretrained model is kept if it has the same labels; otherwise a new head replaces it, with a line in
    `notes`. example: a text on which a pretrained model is tried. Raises BadInput if the model can't be loaded.
    """
    from transformers import AutoModelForSequenceClassification, BertConfig

    torch.manual_seed(seed)
    if model.name != "scratch":
        encoder = pretrained.load(AutoModelForSequenceClassification, model, notes, labels, tokenizer)
        _require_fit(encoder, model, tokenizer, max_length, example)
        return encoder
    names = {"id2label": dict(enumerate(labels)), "label2id": {name: number for number, name in enumerate(labels)}}
    if model.hidden_size % model.heads:
        raise BadInput(f"model.heads: a hidden_size of {model.hidden_size} can't be divided into {model.heads} heads.")
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=model.hidden_size,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        intermediate_size=4 * model.hidden_size,
        max_position_embeddings=max_length,
        initializer_range=0.02 * (768 / model.hidden_size) ** 0.5,  # BERT's 0.02 is for a width of 768
        pad_token_id=tokenizer.pad_token_id,
        **names,
    )
    return AutoModelForSequenceClassification.from_config(config)


def _require_fit(encoder: torch.nn.Module, model: Model, tokenizer, max_length: int, example: str) -> None:
    """Raise BadInput if a model can't take its tokenizer's tokens, or a text of `max_length` tokens."""
    pretrained.require_embeddings(encoder, model.name, len(tokenizer))
    longest = tokenizer(" ".join([example] * max_length), truncation=True, return_tensors="pt")
    try:
        with torch.no_grad():
            encoder.eval()(input_ids=longest["input_ids"], attention_mask=longest["attention_mask"])
    except (RuntimeError, IndexError, ValueError) as error:
        tokens = longest["input_ids"].shape[1]
        raise BadInput(
            f"model.name: {model.name} can't take a text of {tokens} tokens ({brief(error)}). Lower data.max_length if"
            " it takes shorter texts; otherwise name another model."
        ) from None
