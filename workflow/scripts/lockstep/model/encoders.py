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
        tokenizer_object=tokenizer, model_max_length=max_length, **dict(zip(names, SPECIAL, strict=True))
    )


def initialise(model: Model, tokenizer, labels: list[str], max_length: int, seed: int, notes: list[str] | None = None):
    """The model with its initial weights: those of the pretrained one under a new head, or all new ones.

    A head that the pretrained model has is kept where it has as many classes; where not, `notes` is told.
    Raises BadInput where a pretrained model can't be had.
    """
    from transformers import AutoModelForSequenceClassification, BertConfig

    torch.manual_seed(seed)
    names = {"id2label": dict(enumerate(labels)), "label2id": {name: number for number, name in enumerate(labels)}}
    if model.name != "scratch":
        encoder = pretrained.load(AutoModelForSequenceClassification, model, notes, labels)
        _require_fit(encoder, model, len(tokenizer), max_length)
        return encoder
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


def _require_fit(pretrained: torch.nn.Module, model: Model, tokens: int, max_length: int) -> None:
    """Raises BadInput where a model can't take the tokenizer's last token, or as many as a text may have."""
    longest = torch.full((1, max_length), tokens - 1)
    try:
        with torch.no_grad():
            pretrained.eval()(input_ids=longest, attention_mask=torch.ones_like(longest))
    except (RuntimeError, IndexError, ValueError) as error:
        have = pretrained.get_input_embeddings().num_embeddings
        if have < tokens:
            why = f"has embeddings for {have} tokens, and its tokenizer has {tokens}. Give it its own tokenizer."
        else:
            why = f"can't take a text of {max_length} tokens ({brief(error)}). Lower data.max_length."
        raise BadInput(f"model.name: {model.name}: {why}") from None
