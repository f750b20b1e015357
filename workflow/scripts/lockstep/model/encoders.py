"""Models of texts: their tokenizers, and the encoder that a classifier begins with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from lockstep.errors import BadInput, brief
from lockstep.model import pretrained
from lockstep.model.models import LOCAL

if TYPE_CHECKING:  # training needs no configuration, and starts sooner without it
    from lockstep.config.sections import Model

EXAMPLE = "Lockstep 测试"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def make_tokenizer(model: Model, texts: Iterable[str], max_length: int):
    """The pretrained tokenizer; for a scratch model and one's own, one token per character of `texts`.

    `texts` are those of the training split. Either one cuts texts to `max_length` tokens.
    """
    from transformers import AutoTokenizer

    if model.name != "scratch" and not model.file:
        with pretrained.explained(model):
            folder = pretrained.folder_of(model, pretrained.SMALL)
            tokenizer = AutoTokenizer.from_pretrained(folder, model_max_length=max_length, **LOCAL)
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise BadInput(f"model.name: {model.name}: holds no tokenizer. Save the one that the model was made with.")
        return tokenizer
    return character_tokenizer(texts, max_length)


def character_tokenizer(texts: Iterable[str], max_length: int):
    """A tokenizer with one token per character (lower case, blanks skipped), most frequent first.

    Characters that stand in `texts` only once become [UNK], so that the model learns what to make of unknown ones.
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
        split_special_tokens=True,  # a text that holds "[SEP]" holds five letters
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
    """The model with its initial weights: those of the pretrained one under a new head, or all new ones.

    A head that the pretrained model has is kept where it tells the same labels apart; where not, `notes` is told.
    example: a text on which a pretrained model is tried. Raises BadInput where one can't be had.
    """
    from transformers import AutoModelForSequenceClassification, BertConfig

    torch.manual_seed(seed)
    if model.name != "scratch":
        encoder = pretrained.load(AutoModelForSequenceClassification, model, notes, labels, tokenizer)
        _require_fit(encoder, model, tokenizer, max_length, example)
        return encoder
    names = {"id2label": dict(enumerate(labels)), "label2id": {name: number for number, name in enumerate(labels)}}
    if model.hidden_size % model.heads:
        raise BadInput(f"model.heads: {model.heads} heads do not divide a hidden_size of {model.hidden_size}.")
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
    """Raises BadInput where a model can't take its tokenizer's tokens, or as many as a text may have."""
    pretrained.require_embeddings(encoder, model.name, len(tokenizer))
    longest = tokenizer(" ".join([example] * max_length), truncation=True, return_tensors="pt")
    try:
        with torch.no_grad():
            encoder.eval()(input_ids=longest["input_ids"], attention_mask=longest["attention_mask"])
    except (RuntimeError, IndexError, ValueError) as error:
        tokens = longest["input_ids"].shape[1]
        raise BadInput(
            f"model.name: {model.name}: can't take a text of {tokens} tokens ({brief(error)}). Lower data.max_length"
            " where it takes shorter ones; else name another model."
        ) from None
