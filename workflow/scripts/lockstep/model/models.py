"""Store, load and rebuild a model, and read properties of a live one.

This module knows neither strategies nor tasks: a model's folder names its class. Untrusted files are safe to load:
weights come from safetensors or torch.load(weights_only=True), which transformers uses since torch 2.6, and code in a
model's folder is never run. trust_remote_code is False, since its default would ask the user at the terminal.
"""

import contextlib
from pathlib import Path

import numpy as np
import torch

from lockstep.errors import BadInput, RunFailed
from lockstep.files import hash_arrays, read_json
from lockstep.model import batch_norm, heads, importing, own

DROPOUT = torch.nn.modules.dropout._DropoutNd  # the base class of all of PyTorch's dropout modules
LOCAL = {"local_files_only": True, "trust_remote_code": False}  # read a folder without network, and run no code of it
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


def load(folder: Path, dropout: float | None = None) -> torch.nn.Module:
    """The model stored in a folder, in float32, with `dropout` everywhere if given. Never downloads.

    Raises BadInput if its files lack a weight.
    """
    return _with_dropout(own.load(folder) if own.is_stored(folder) else _load_transformers(folder, dropout), dropout)


def _with_dropout(model: torch.nn.Module, dropout: float | None) -> torch.nn.Module:
    for module in model.modules() if dropout is not None else ():
        if isinstance(module, DROPOUT):
            module.p = dropout
    return model


@importing.without_unused()
def _load_transformers(folder: Path, dropout: float | None) -> torch.nn.Module:
    if folder.is_dir():
        require_weights(folder, str(folder))
    config, cls = _architecture(folder, dropout)
    model, report = cls.from_pretrained(folder, config=config, dtype=torch.float32, output_loading_info=True, **LOCAL)
    if absent := [name for name, _ in model.named_parameters() if name in report["missing_keys"]]:
        more = f" and {len(absent) - 1} more of its weights" if absent[1:] else ""
        raise BadInput(  # transformers would draw them at random
            f"{folder}: its files hold no {absent[0]}{more}. If they hold them by other names, convert them: --weights."
        )
    return model


def checkpoint_activations(model: torch.nn.Module) -> None:
    """Have each layer's activations computed again in the backward pass (Chen et al. 2016, arXiv:1604.06174).

    Random states are put back for it, so that dropout is the same. Raises RunFailed if the model can't do it.
    """
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise RunFailed(
            f"activation_checkpointing: {type(model).__name__} can't compute its activations again. Leave it out; it is"
            " for those of transformers' models that have layers for it."
        )
    if any(batch_norm.depends_on_batch(module) for module in model.modules()):
        raise RunFailed(
            f"activation_checkpointing: {type(model).__name__} has batch normalisation, whose running statistics would"
            " take each batch twice. Leave it out."
        )
    # Its name now, and the one that transformers 5.17 has.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def checkpoints_activations(model: torch.nn.Module) -> bool:
    """Whether a layer of the model computes its activations again in the backward pass."""
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())


def tokenizer(folder: Path):
    """The tokenizer stored in a folder of transformers'. Never downloads."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, **LOCAL)


def _architecture(folder: Path, dropout: float | None = None):
    """The configuration in a folder of transformers', with `dropout` if given, and its model's class."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, **LOCAL)
    cls = getattr(transformers, (config.architectures or [""])[0], None)
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        raise BadInput(
            f"{folder}: its config.json names no model class of the installed transformers (architectures:"
            f" {config.architectures}). Name a folder that transformers saved a model in."
        )
    for name in _dropout_keys(config) if dropout is not None else ():
        setattr(config, name, dropout)
    return config, cls


def import_code(folder: Path) -> None:
    """Import the class of the model stored in a folder, if it is one of transformers'; `load` is quick afterwards."""
    if not own.is_stored(folder):
        with importing.without_unused():
            _architecture(folder)


def build(folder: Path, dropout: float | None = None) -> torch.nn.Module:
    """A model of the class and size of the one stored in a folder, with arbitrary weights; `dropout` as in `load`."""
    if own.is_stored(folder):
        return _with_dropout(own.build(folder), dropout)
    config, cls = _architecture(folder, dropout)
    return _with_dropout(cls(config), dropout)


def classifier(folder: Path, labels: list[str], notes: list[str]) -> torch.nn.Module:
    """A classifier of `labels`, with the size of the model stored in a folder and arbitrary weights."""
    if own.is_stored(folder):
        raise BadInput(f"{folder} is a model of your own, which stores its labels. Leave --labels out.")
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, **LOCAL)
    heads.set_labels(config, labels, str(folder), notes)
    kind = "Image" if task_name(folder) == "image-classification" else "Sequence"
    return getattr(transformers, f"AutoModelFor{kind}Classification").from_config(config)


def save(model: torch.nn.Module, folder: Path, labels: list[str] | None = None) -> None:
    """Write a model into `folder`, in the format of transformers or of model/own.py; only the latter takes `labels`."""
    if is_of_transformers(model):
        model.save_pretrained(folder)
    else:
        own.save(model, folder, labels)


def is_of_transformers(model: torch.nn.Module) -> bool:
    """Whether a model is one of transformers', and not in the format of model/own.py."""
    return hasattr(model, "save_pretrained")


def is_stored(folder: Path) -> bool:
    """Whether a folder holds a model."""
    return own.is_stored(folder) or (folder / "config.json").is_file()


CAUSAL = ("ForCausalLM", "LMHeadModel")  # endings of transformers' class names of causal language models
ENDINGS = {"ForSequenceClassification": "text-classification", "ForImageClassification": "image-classification"}
ENDINGS |= dict.fromkeys(CAUSAL, "language-modelling")


def task_name(folder: Path) -> str | None:
    """The task of the model stored in a folder, by the name of its class; None if it is unknown.

    For a model in the format of model/own.py the files beside it tell: a text model has a tokenizer, and a language
    model has no labels.
    """
    if own.is_stored(folder):
        if (folder / "segments.json").is_file():
            return "image-segmentation"
        if not (folder / "tokenizer_config.json").is_file():
            return "image-classification"
        return "text-classification" if own.labels(folder) is not None else "language-modelling"
    if not (folder / "config.json").is_file():
        return None
    names = read_json(folder / "config.json").get("architectures") or [""]
    return next((task for ending, task in ENDINGS.items() if names[0].endswith(ending)), None)


def is_causal_name(name: str) -> bool:
    """Whether this name of a transformers class is that of a causal language model."""
    return name.endswith(CAUSAL)


def labels(folder: Path) -> list[str]:
    """The labels of the classifier stored in a folder, in the order of their numbers.

    transformers 4 left its default names of two labels out of config.json. Raises BadInput if there is only one label.
    """
    if own.is_stored(folder):
        return own.labels(folder)
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, **LOCAL)
    names = [str(name) for _, name in sorted((config.id2label or {}).items())]
    if len(names) < 2:
        raise BadInput(f"{folder}: its model has one output, as for regression, and no classes. Name a classifier.")
    return names


def count_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@contextlib.contextmanager
def keep_float64():
    """Make `Tensor.float` and `Tensor.to(float32)` leave float64 tensors unchanged within the block.

    Models call them to widen bf16, as ModernBERT does in its rotary embedding and Llama in its norms. In a float64
    proof they would round to float32, where a difference of 1e-16 can become one of 1e-7.
    """
    narrow, to = torch.Tensor.float, torch.Tensor.to

    def float_(tensor, *arguments, **options):
        return tensor if tensor.dtype == torch.float64 else narrow(tensor, *arguments, **options)

    def to_(tensor, *arguments, **options):
        narrows = torch.float32 in arguments or options.get("dtype") is torch.float32
        return tensor if tensor.dtype == torch.float64 and narrows else to(tensor, *arguments, **options)

    torch.Tensor.float, torch.Tensor.to = float_, to_
    try:
        yield
    finally:
        torch.Tensor.float, torch.Tensor.to = narrow, to


def _dropout_keys(config) -> list[str]:
    """The names of a configuration's dropout probabilities, which differ between architectures."""
    return [
        name
        for name, value in config.to_dict().items()
        if "drop" in name and not isinstance(value, bool) and isinstance(value, int | float | None)
    ]


def dropouts(model: torch.nn.Module) -> list[float]:
    """The distinct dropout probabilities of a live model: of dropout modules, and of attributes that name dropout.

    LoRA's dropout is left out; it has a setting of its own, which model/lora.py reads back.
    """
    modules = [module for name, module in model.named_modules() if ".lora_dropout." not in name]
    probabilities = {module.p for module in modules if isinstance(module, DROPOUT)}
    for module in modules:
        probabilities |= {
            float(value) for name, value in vars(module).items() if "drop" in name and type(value) in (int, float)
        }
    return sorted(probabilities)


def heads_of_attention(model: torch.nn.Module) -> dict[str, int]:
    """How many attention heads a model of transformers' has, by its configuration's names for them; else none."""
    config = getattr(model, "config", None)
    named = {name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    return {name: number for name, number in named.items() if isinstance(number, int)}


def has_batch_statistics(model: torch.nn.Module) -> bool:
    """Whether the model's output for a sample depends on the rest of the batch, as with batch normalisation."""
    return any(batch_norm.depends_on_batch(module) for module in model.modules())


def has_changing_buffers(model: torch.nn.Module) -> bool:
    """Whether DDP must broadcast buffers in every forward pass, its default. BERT's are constant position numbers."""
    return any(buffer.is_floating_point() for buffer in model.buffers())


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """The second names of tied tensors, mapped to the first: an output layer may share its weight with the embedding.

    safetensors and DeepSpeed store a tied tensor only once, so some strategies' checkpoints lack the second name.
    """
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    stored, first = model.state_dict().keys(), {}
    return {
        name: first[id(tensor)]
        for name, tensor in every
        if name in stored and first.setdefault(id(tensor), name) != name
    }


def with_tied(state: dict[str, torch.Tensor], tied: dict[str, str]) -> dict[str, torch.Tensor]:
    """A state dict with the second names of tied tensors (`tied_names`) added, as copies.

    A second name that is present with other values keeps them, so that a comparison of hashes finds the difference.
    """
    seconds = {}
    for name, first in tied.items():
        own = state.get(name)  # DeepSpeed's stage 3 stores it as an empty tensor
        seconds[name] = (own if own is not None and own.shape == state[first].shape else state[first]).clone()
    return state | seconds


def keep_masks() -> None:
    """Make transformers apply every attention mask, even one that masks nothing.

    To skip such a mask, transformers reads it back, which waits for the device in every forward pass.
    """
    with importing.without_unused():
        from transformers import AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

    def mask(**arguments):
        return sdpa_mask(**arguments | {"allow_is_bidirectional_skip": False})

    AttentionMaskInterface.register("sdpa", mask)


def require_weights(folder: Path, name: str) -> None:
    """Raise BadInput if a folder holds no weights in a format of transformers; the message calls it `name`."""
    if not any(file for pattern in WEIGHT_FILES for file in folder.glob(pattern)):
        raise BadInput(f"{name}: holds no model weights ({' or '.join(WEIGHT_FILES)}).")


def hash_weights(state: dict[str, torch.Tensor]) -> str:
    """sha256 over a state dict's names, shapes and values; tensors may be on any device."""
    return hash_arrays({name: np.ascontiguousarray(tensor.detach().cpu().numpy()) for name, tensor in state.items()})
