"""The model: built or loaded, its tokenizer and its initial weights.

Knows nothing of strategies. Foreign bytes: weights come from safetensors, or from torch.load(weights_only=True),
which is what transformers does since torch 2.6; code that comes with a model is never run, nor asked for (left to
its default, trust_remote_code asks whoever is at the terminal).
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError

from lockstep.errors import BadInput, brief
from lockstep.files import hash_arrays
from lockstep.model import lean

if TYPE_CHECKING:  # training needs no configuration, and starts sooner without it
    from lockstep.config.sections import Model

DROPOUT = torch.nn.modules.dropout._DropoutNd  # the base class of all of PyTorch's
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LOCAL = {"local_files_only": True, "trust_remote_code": False}  # how transformers is to read a folder: as data
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
# What is fetched of a model: configuration and tokenizer, then weights in the better of the two formats that it has.
SMALL = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
WEIGHTS = (["model.safetensors", "model-*.safetensors"], ["pytorch_model.bin", "pytorch_model-*.bin"])


def make_tokenizer(model: Model, texts: Iterable[str], max_length: int):
    """The pretrained tokenizer, or for a scratch model one token per character of `texts`, the training split.

    Either one cuts texts to `max_length` tokens.
    """
    from transformers import AutoTokenizer

    if model.name != "scratch":
        with _explained(model):
            tokenizer = AutoTokenizer.from_pretrained(_folder(model, SMALL), model_max_length=max_length, **LOCAL)
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise BadInput(f"model.name: {model.name}: holds no tokenizer. Save the one that the model was made with.")
        return tokenizer
    return character_tokenizer(texts, max_length)


def character_tokenizer(texts: Iterable[str], max_length: int):
    """A tokenizer with one token per character (lower case, blanks skipped), most frequent first.

    Characters that stand in `texts` only once become [UNK], so that the model learns what to make of unknown ones.
    """
    from collections import Counter

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
        folder = _with_weights(model)
        with _explained(model):
            pretrained, report = AutoModelForSequenceClassification.from_pretrained(
                folder,
                **LOCAL,
                num_labels=len(labels),
                dtype=torch.float32,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **names,
            )
        others = {name: shape for name, shape, _ in report["mismatched_keys"]}
        if body := [name for name in others if name.startswith(f"{pretrained.base_model_prefix}.")]:
            raise BadInput(f"model.name: {model.name}: {body[0]} has another shape than its config.json says.")
        _require_body(pretrained, report["missing_keys"], model.name, notes)
        if others and notes is not None:
            classes = next(iter(others.values()))[0]
            said = f"{model.name} ends in a head of {classes} classes, and the data has {len(labels)}"
            notes.append(f"{said}: a new head replaces it")
        _require_fit(pretrained, model, len(tokenizer), max_length)
        return pretrained
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


@lean.imports()
def load(folder: Path, dropout: float | None = None) -> torch.nn.Module:
    """The model in a plain Hugging Face folder, in float32, with `dropout` everywhere if given. Never downloads."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    if folder.is_dir():
        _require_weights(folder, str(folder))
    config = AutoConfig.from_pretrained(folder, **LOCAL)
    if dropout is not None:
        for name in _dropout_keys(config):
            setattr(config, name, dropout)
    model = AutoModelForSequenceClassification.from_pretrained(folder, config=config, dtype=torch.float32, **LOCAL)
    if dropout is not None:
        for module in model.modules():
            if isinstance(module, DROPOUT):
                module.p = dropout
    return model


def _require_body(pretrained: torch.nn.Module, missing, name: str, notes: list[str] | None) -> None:
    """Raises BadInput where a weights file held nothing of the model below its head; notes what else was not in it.

    transformers draws at random what a file lacks, and only warns.
    """
    body = [key for key, _ in pretrained.named_parameters() if key.startswith(f"{pretrained.base_model_prefix}.")]
    absent = [key for key in body if key in missing]
    if body and absent == body:
        raise BadInput(
            f"model.name: {name}: its weights file holds no {body[0]}, nor any other weight of the model in its"
            " config.json. Name a model whose files belong together."
        )
    if absent and notes is not None:
        others = f" and {len(absent) - 1} more of {len(body)} weights" if absent[1:] else ""
        notes.append(f"{name} holds no {absent[0]}{others}: new ones take their place")


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


@contextlib.contextmanager
def kept_wide():
    """Have `Tensor.float` leave float64 as it is: models call it to widen bf16, and would narrow float64 by it.

    ModernBERT does so in its rotary embedding: a rounding to float32, which a difference of 1e-16 tips now and then.
    """
    narrow = torch.Tensor.float

    def float_(tensor, *arguments, **options):
        return tensor if tensor.dtype == torch.float64 else narrow(tensor, *arguments, **options)

    torch.Tensor.float = float_
    try:
        yield
    finally:
        torch.Tensor.float = narrow


def _dropout_keys(config) -> list[str]:
    """What a configuration calls its dropout probabilities: each architecture has names of its own."""
    return [
        name
        for name, value in config.to_dict().items()
        if "drop" in name and not isinstance(value, bool) and isinstance(value, int | float | None)
    ]


def dropouts(model: torch.nn.Module) -> list[float]:
    """The probabilities, each once, with which a live model drops anything: of modules, and of what they call."""
    modules = list(model.modules())
    probabilities = {module.p for module in modules if isinstance(module, DROPOUT)}
    for module in modules:
        probabilities |= {
            float(value) for name, value in vars(module).items() if "drop" in name and type(value) in (int, float)
        }
    return sorted(probabilities)


def has_changing_buffers(model: torch.nn.Module) -> bool:
    """Whether DDP must send buffers in every forward pass, as it does by default. BERT's are position numbers."""
    return any(buffer.is_floating_point() for buffer in model.buffers())


def keep_masks() -> None:
    """Have transformers apply every attention mask, also one that masks nothing.

    To leave that one out it would read the mask back, and so wait for the device in every forward pass.
    """
    with lean.imports():
        from transformers import AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

    def mask(**arguments):
        return sdpa_mask(**arguments | {"allow_is_bidirectional_skip": False})

    AttentionMaskInterface.register("sdpa", mask)


def _folder(model: Model, patterns: list[str]) -> Path:
    """Where a pretrained model's files of these patterns are: in its own folder, or in the hub's cache.

    Whatever transformers is to read lies in a folder then. Left to fetch by itself it would ask for a file after the
    other, and have a service of the hub's convert a model that has no safetensors, to fetch that one as well.
    """
    if Path(model.name).is_dir():
        return Path(model.name)
    from lockstep.data import hub

    return hub.fetch_model(model.name, model.revision, patterns)


def _with_weights(model: Model) -> Path:
    folder = _folder(model, [*SMALL, *WEIGHTS[0]])
    if not any(folder.glob("*.safetensors")):
        folder = _folder(model, [*SMALL, *WEIGHTS[1]])
    _require_weights(folder, f"model.name: {model.name}")
    return folder


def _require_weights(folder: Path, name: str) -> None:
    if not any(file for pattern in WEIGHT_FILES for file in folder.glob(pattern)):
        raise BadInput(f"{name}: holds no model weights ({' or '.join(WEIGHT_FILES)}).")


@contextlib.contextmanager
def _explained(model: Model):
    """What transformers says where a model can't be had, in one line."""
    try:
        yield
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError, pickle.UnpicklingError) as error:
        at = f" at revision {model.revision}" if model.revision else ""
        raise BadInput(f"model.name: {model.name}{at} can't be loaded: {brief(error)}") from None


def hash_weights(state: dict[str, torch.Tensor]) -> str:
    """sha256 over a state dict's names, shapes and float values, wherever its tensors are."""
    return hash_arrays({name: np.ascontiguousarray(tensor.detach().cpu().numpy()) for name, tensor in state.items()})
