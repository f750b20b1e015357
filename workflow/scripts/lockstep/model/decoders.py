"""Causal language models: their tokenizers, a small model from scratch, and what a pretrained model must support."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from lockstep.errors import BadInput, brief
from lockstep.model import encoders, pretrained
from lockstep.model.models import LOCAL, is_causal_name

if TYPE_CHECKING:  # a training process needs no configuration, and starts sooner without this import
    from lockstep.config.sections import Model

VOCABULARY = 1024  # tokens of a new tokenizer, 256 of which are the bytes
# These names contain a character that no token of bytes has. Texts that often contain "<s>" would teach the tokenizer a
# token of that name, which would then be taken for the special one.
PAD, BEGIN, END = "⟨pad⟩", "⟨s⟩", "⟨/s⟩"


def make_tokenizer(model: Model, texts: Iterable[str], max_length: int):
    """The pretrained tokenizer; for a scratch model a new one, trained on `texts`, those of the training split."""
    if model.name != "scratch":
        return encoders.make_tokenizer(model, (), max_length)
    return byte_pairs(texts, max_length)


def byte_pairs(texts: Iterable[str], max_length: int):
    """A tokenizer by byte-pair encoding over bytes (Sennrich et al. 2016, arXiv:1508.07909).

    It encodes any text without loss. The same texts give the same tokenizer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[PAD, BEGIN, END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BEGIN,
        eos_token=END,
        model_max_length=max_length,
        split_special_tokens=True,  # the name of a special token in a text is ordinary letters
        clean_up_tokenization_spaces=False,
    )


def initialise(model: Model, tokenizer, max_length: int, seed: int, notes: list[str]) -> torch.nn.Module:
    """The model with its initial weights: the pretrained ones, or those of a small new Llama.

    Raises BadInput if a pretrained model can't be loaded, is not a causal language model, or does not fit its
    tokenizer.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    if model.name != "scratch":
        _require_causal(model)
        decoder = pretrained.load(AutoModelForCausalLM, model, notes)
        _require_fit(decoder, model, len(tokenizer), max_length)
    else:
        if model.hidden_size % (2 * model.heads):
            raise BadInput(
                f"model.heads: a hidden_size of {model.hidden_size} can't be divided into {model.heads} heads of an"
                " even width."
            )
        decoder = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=model.hidden_size,
                # Llama's three matrices then have as many weights as two matrices of width 4 * hidden_size (Shazeer
                # 2020, arXiv:2002.05202), rounded up to a multiple of 16.
                intermediate_size=math.ceil(8 * model.hidden_size / 48) * 16,
                num_hidden_layers=model.layers,
                num_attention_heads=model.heads,
                num_key_value_heads=model.heads,
                max_position_embeddings=max_length,
                initializer_range=0.02 * (768 / model.hidden_size) ** 0.5,  # 0.02 is for a width of 768
                tie_word_embeddings=False,
                pad_token_id=tokenizer.pad_token_id,
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
        )
    decoder.config.use_cache = False  # training does not use the cache of keys and values
    return decoder


def _require_causal(model: Model) -> None:
    """Raise BadInput if config.json names another kind of model; transformers would give such a model a new head."""
    from transformers import AutoConfig

    with pretrained.explained(model):
        config = AutoConfig.from_pretrained(pretrained.folder_of(model, pretrained.SMALL), **LOCAL)
    name = (config.architectures or ["model without a name"])[0]
    if not is_causal_name(name) or config.is_encoder_decoder:
        raise BadInput(
            f"model.name: {model.name} is a {name}, which is not a causal language model. Name one that was saved as"
            " one (LlamaForCausalLM, for example)."
        )


def _require_fit(decoder: torch.nn.Module, model: Model, tokens: int, max_length: int) -> None:
    """Raise BadInput if a model can't take its tokenizer's tokens, sequences of this length, or packed documents."""
    pretrained.require_embeddings(decoder, model.name, tokens)
    window = getattr(decoder.config, "sliding_window", None)
    if window and window < max_length:
        raise BadInput(
            f"model.name: {model.name} attends to {window} tokens only. Lower data.max_length from {max_length}."
        )
    decoder.eval()
    try:
        with torch.no_grad():
            decoder(input_ids=torch.zeros(1, max_length, dtype=torch.int64), use_cache=False)
    except (RuntimeError, IndexError, ValueError) as error:
        raise BadInput(
            f"model.name: {model.name} can't take a sequence of {max_length} tokens ({brief(error)}). Lower"
            " data.max_length."
        ) from None
    try:
        separate = separates_documents(decoder, tokens)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        raise BadInput(
            f"model.name: {model.name} fails with an attention_mask of [sequences, 1, tokens, tokens], which keeps"
            f" documents that share a sequence from seeing each other ({brief(error)}). Name another model, or change"
            " its config.json."
        ) from None
    if not separate:
        raise BadInput(
            f"model.name: {model.name} ignores an attention_mask of [sequences, 1, tokens, tokens] or position_ids, so"
            " documents that share a sequence would see each other. Name another model."
        )
    decoder.train()


def separates_documents(decoder: torch.nn.Module, tokens: int) -> bool:
    """Whether a document's logits depend neither on a document packed before it nor on later tokens."""
    ids = torch.arange(7)[None] % tokens
    documents = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    mask = (documents[:, None] == documents) & torch.ones(7, 7, dtype=torch.bool).tril()
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    with torch.no_grad():
        together = decoder(input_ids=ids, attention_mask=mask[None, None], position_ids=positions, use_cache=False)
        alone = decoder(input_ids=ids[:, 3:], use_cache=False)
        shorter = decoder(input_ids=ids[:, 3:5], use_cache=False)
    scale = 1e-3 * alone.logits.std().item()
    return torch.allclose(together.logits[:, 3:], alone.logits, rtol=0, atol=scale) and torch.allclose(
        shorter.logits, alone.logits[:, :2], rtol=0, atol=scale
    )
