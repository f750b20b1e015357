"""The model: as it is stored, loaded and built again, and what can be asked of a live one.

Knows nothing of strategies, nor of tasks: a folder says of which class its model is. Foreign bytes: weights come from
safetensors, or from torch.load(weights_only=True), which is what transformers does since torch 2.6; code that comes
with a model is never run, nor asked for (left to its default, trust_remote_code asks whoever is at the terminal).
"""

import contextlib
from pathlib import Path

import numpy as np
import torch

from lockstep.errors import BadInput
from lockstep.files import hash_arrays, read_json
from lockstep.model import batch_norm, heads, lean, own

DROPOUT = torch.nn.modules.dropout._DropoutNd  # the base class of all of PyTorch's
LOCAL = {"local_files_only": True, "trust_remote_code": False}  # how transformers is to read a folder: as data
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


def load(folder: Path, dropout: float | None = None) -> torch.nn.Module:
    """The model stored in a folder, in float32, with `dropout` everywhere if given. Never downloads."""
    model = own.load(folder) if own.is_stored(folder) else _load_transformers(folder, dropout)
    if dropout is not None:
        for module in model.modules():
            if isinstance(module, DROPOUT):
                module.p = dropout
    return model


@lean.imports()
def _load_transformers(folder: Path, dropout: float | None) -> torch.nn.Module:
    if folder.is_dir():
        require_weights(folder, str(folder))
    config, cls = _architecture(folder)
    if dropout is not None:
        for name in _dropout_keys(config):
            setattr(config, name, dropout)
    return cls.from_pretrained(folder, config=config, dtype=torch.float32, **LOCAL)


def tokenizer(folder: Path):
    """The tokenizer stored in a folder of transformers'. Never downloads."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, **LOCAL)


def _architecture(folder: Path):
    """The configuration in a folder of transformers', and the class that its model was saved as."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, **LOCAL)
    cls = getattr(transformers, (config.architectures or [""])[0], None)
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        raise BadInput(
            f"{folder}: its config.json names no class of this transformers for its model (architectures:"
            f" {config.architectures}). Name the folder of a model as transformers saves them."
        )
    return config, cls


def import_code(folder: Path) -> None:
    """Import the class of the model stored in a folder, if it is one of transformers'; `load` does so too."""
    if not own.is_stored(folder):
        with lean.imports():
            _architecture(folder)


def build(folder: Path) -> torch.nn.Module:
    """A model of the class and size of the one stored in a folder, with any weights."""
    if own.is_stored(folder):
        return own.build(folder)
    config, cls = _architecture(folder)
    return cls(config)


def classifier(folder: Path, labels: list[str], notes: list[str]) -> torch.nn.Module:
    """A classifier of these labels, by their numbers, of the size of the model stored in a folder; with any weights."""
    if own.is_stored(folder):
        raise BadInput(f"{folder}: is a model of one's own, and knows its labels. Leave --labels out.")
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, **LOCAL)
    heads.set_labels(config, labels, str(folder), notes)
    kind = "Image" if task_name(folder) == "image-classification" else "Sequence"
    return getattr(transformers, f"AutoModelFor{kind}Classification").from_config(config)


def save(model: torch.nn.Module, folder: Path, labels: list[str] | None = None) -> None:
    """Write a model into `folder`: as transformers does, or as model/own.py says; there with `labels`, if given."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)
    else:
        own.save(model, folder, labels)


def is_stored(folder: Path) -> bool:
    """Whether a folder holds a model."""
    return own.is_stored(folder) or (folder / "config.json").is_file()


CAUSAL = ("ForCausalLM", "LMHeadModel")  # how transformers' names of causal language models end
ENDINGS = {"ForSequenceClassification": "text-classification", "ForImageClassification": "image-classification"}
ENDINGS |= dict.fromkeys(CAUSAL, "language-modelling")


def task_name(folder: Path) -> str | None:
    """The task for which the model stored in a folder was made, by the name of its class; None where that is not known.

    One of model/own.py tells its inputs by the files beside it, a tokenizer's or none; and a language model has no
    labels.
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
    """Whether transformers' class of this name is a causal language model."""
    return name.endswith(CAUSAL)


def labels(folder: Path) -> list[str]:
    """The labels that the classifier stored in a folder tells apart, by their numbers."""
    if own.is_stored(folder):
        return own.labels(folder)
    names = read_json(folder / "config.json")["id2label"]
    return [names[str(number)] for number in range(len(names))]


def count_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@contextlib.contextmanager
def kept_wide():
    """Have `Tensor.float`, and `Tensor.to` float32, leave float64 as it is: models widen bf16 so, and would narrow it.

    ModernBERT does so in its rotary embedding, and Llama in its norms: a rounding to float32, which a difference of
    1e-16 tips now and then.
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
    """What a configuration calls its dropout probabilities: each architecture has names of its own."""
    return [
        name
        for name, value in config.to_dict().items()
        if "drop" in name and not isinstance(value, bool) and isinstance(value, int | float | None)
    ]


def dropouts(model: torch.nn.Module) -> list[float]:
    """The probabilities, each once, with which a live model drops anything: of modules, and of what they call.

    Not what LoRA drops before its updates, which has a setting of its own.
    """
    modules = [module for name, module in model.named_modules() if ".lora_dropout." not in name]  # model/lora.py has it
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
    """Whether what the model makes of a sample depends on the others of its batch, as batch normalisation does."""
    return any(batch_norm.depends_on_batch(module) for module in model.modules())


def has_changing_buffers(model: torch.nn.Module) -> bool:
    """Whether DDP must send buffers in every forward pass, as it does by default. BERT's are position numbers."""
    return any(buffer.is_floating_point() for buffer in model.buffers())


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Tensors of a state that are another under a second name, as an output layer may be the embedding: name -> first.

    safetensors keeps each only once, and DeepSpeed too, so what some strategies save lacks them.
    """
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    stored, first = model.state_dict().keys(), {}
    return {
        name: first[id(tensor)]
        for name, tensor in every
        if name in stored and first.setdefault(id(tensor), name) != name
    }


def with_tied(state: dict[str, torch.Tensor], tied: dict[str, str]) -> dict[str, torch.Tensor]:
    """A state dict in which the second names (`tied_names`) are there too, with tensors of their own.

    One that holds other values than its first name stays so, which its hash then shows.
    """
    seconds = {}
    for name, first in tied.items():
        own = state.get(name)  # at DeepSpeed's stage 3 it is there, and empty
        seconds[name] = (own if own is not None and own.shape == state[first].shape else state[first]).clone()
    return state | seconds


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


def require_weights(folder: Path, name: str) -> None:
    """Raises BadInput where a folder, told of as `name`, holds no weights of transformers'."""
    if not any(file for pattern in WEIGHT_FILES for file in folder.glob(pattern)):
        raise BadInput(f"{name}: holds no model weights ({' or '.join(WEIGHT_FILES)}).")


def hash_weights(state: dict[str, torch.Tensor]) -> str:
    """sha256 over a state dict's names, shapes and float values, wherever its tensors are."""
    return hash_arrays({name: np.ascontiguousarray(tensor.detach().cpu().numpy()) for name, tensor in state.items()})
