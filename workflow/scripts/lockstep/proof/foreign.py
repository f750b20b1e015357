"""Somebody else's checkpoint, as values only: nothing that stands in it is run.

A state dict, whatever it lies in ({"model": ..., "ep": ...}) and whatever was wrapped around the model when it was
saved (`module.`, `_orig_mod.`); a folder of transformers', of DeepSpeed's engine, or of PyTorch's distributed
checkpoints, as FSDP writes them. The names must then be those of the model that it is said to be, every one of them.
"""

import contextlib
import io
import pickle
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lockstep.errors import BadInput, brief
from lockstep.files import atomic_folder
from lockstep.model import models

# What wrappers put into the names of parameters: DataParallel and DDP; torch.compile; Fabric; FSDP1; checkpointing.
WRAPPERS = {"module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
DERIVED = ("position_ids", "token_type_ids")  # buffers that older transformers stored, and newer ones make
# What the index of a distributed checkpoint is made of, by module.
INDEX = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    ),
}
SHARDED = "DCP_SHARDING_INFO"  # in the heads of safetensors that are parts of a distributed checkpoint
SHOWN = 4  # names that a message lists


def convert(weights: Path, model: Path, destination: Path, labels: list[str] | None) -> list[str]:
    """Make of somebody's `weights` a model folder, of the class and size of the one in `model`; returns notes.

    labels: the names of its classes by their numbers; those that the folder `model` knows if None.
    Raises BadInput where the weights are not all of that model's, and of its shapes.
    """
    notes: list[str] = []
    blank = _blank(model, labels, notes)
    tied = models.tied_names(blank)
    names = [name for name in blank.state_dict() if name not in tied]
    state, of_weights = read(weights, names)
    if missing := [name for name in names if name not in state]:
        raise BadInput(
            f"{weights}: lacks {_listed(missing)}, {len(missing)} of the {len(names)} tensors of the model in {model}."
            " Name the folder of the model that they are of."
        )
    own = blank.state_dict()
    for name in names:
        if state[name].is_floating_point() != own[name].is_floating_point():
            kind = str(state[name].dtype).removeprefix("torch.")
            raise BadInput(
                f"{weights}: {name} is {kind}, and the model has numbers of another kind there. Turn quantised weights"
                " back into floats first, by what made them."
            )
        if not state[name].isfinite().all():
            raise BadInput(f"{weights}: {name} holds nan or infinity. Take a checkpoint from before training diverged.")
        if state[name].shape != own[name].shape:
            raise BadInput(
                f"{weights}: {name} is {list(state[name].shape)}, and {list(own[name].shape)} in the model in {model}."
                " Name the folder of the model that it is of, and all of its labels."
            )
    blank.load_state_dict(models.with_tied(state, tied))
    with atomic_folder(destination) as temporary:
        models.save(blank, temporary, labels or _labels(model))
        _copy_beside(model, temporary)
    return notes + of_weights


def read(weights: Path, names: list[str]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors of a checkpoint that a model of these `names` has, by those, in float32; and notes.

    Raises BadInput where it can't be read as values, or holds more than one such model.
    """
    if not weights.exists():
        raise BadInput(f"--weights: {weights} does not exist.")
    try:
        stored = _folder(weights) if weights.is_dir() else dict(_flat(_file(weights)))
    except BadInput:
        raise
    except Exception as error:  # pickle, zipfile, safetensors, DeepSpeed and PyTorch each have their own
        raise BadInput(
            f"{weights}: can't be read as tensors alone: {brief(error)}. Save the model's state_dict() by itself, where"
            " it was trained."
        ) from None
    for name, tensor in stored.items():
        if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
            kind = "without values (meta)" if tensor.is_meta else "sparse or quantised"
            raise BadInput(f"{weights}: {name} is a tensor {kind}. Save it as a dense one, of floats.")
    found = _matched(stored, names, weights)
    notes = []
    rest = [name for name in stored if name not in found.values() and not name.endswith(DERIVED)]
    if rest:
        notes.append(f"not of the model, and left out: {_listed(rest)} ({len(rest)} tensors)")
    kinds = {str(stored[name].dtype).removeprefix("torch.") for name in found.values()} - {"float32", "int64", "bool"}
    if kinds:
        notes.append(f"weights in {', '.join(sorted(kinds))} are float32 from here on")
    return {name: _single(stored[source]) for name, source in found.items()}, notes


def _single(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _matched(stored: dict[str, torch.Tensor], names: list[str], weights: Path) -> dict[str, str]:
    """Which stored tensor each of the model's is: by its name, or by its name after one that all of them begin with."""
    plain = {}
    for source in stored:
        first = plain.setdefault(_unwrapped(source, names), source)
        if first is not source and not torch.equal(stored[first], stored[source]):
            raise BadInput(
                f"{weights}: holds such a model twice, as {first} and {source}, which are not the same. Save the one"
                " that is meant by itself."
            )
    longest = max(names, key=len)
    beginnings = {name.removesuffix(longest) for name in plain if name == longest or name.endswith(f".{longest}")}
    complete = {
        beginning: {name: plain[beginning + name] for name in names if beginning + name in plain}
        for beginning in beginnings
    }
    if len(complete) > 1:
        raise BadInput(
            f"{weights}: holds such a model {len(complete)} times, under {_listed(sorted(complete))}. Save the one that"
            " is meant by itself."
        )
    if not complete:
        held = _listed(list(stored)) or "no tensor"
        raise BadInput(
            f"{weights}: holds no tensor called {longest}, which the model has; it holds {held}."
            " Name the folder of the model that it is of."
        )
    return next(iter(complete.values()))


def _unwrapped(name: str, names: list[str]) -> str:
    """A tensor's name without what wrappers put into it, unless the model has one of this name."""
    return name if name in names else ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _flat(value, above: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in nested dicts, by the names of all keys above them."""
    if isinstance(value, torch.Tensor):
        yield above.removesuffix("."), value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{above}{key}.")


def _file(file: Path):
    if file.suffix == ".safetensors":
        return load_file(file)
    return torch.load(file, map_location="cpu", weights_only=True)


def _folder(folder: Path) -> dict[str, torch.Tensor]:
    if any(folder.rglob("*model_states.pt")):
        return _of_deepspeed(folder)
    if (folder / ".metadata").is_file():
        return _of_pytorch(_Reader(folder))
    if any(_is_sharded(file) for file in folder.glob("*.safetensors")):
        return _of_pytorch(HuggingFaceStorageReader(str(folder)))
    files = [file for pattern in models.WEIGHT_FILES for file in sorted(folder.glob(pattern))]
    if not files:
        raise BadInput(
            f"{folder}: holds no weights that are known: of transformers ({' or '.join(models.WEIGHT_FILES)}), of"
            " DeepSpeed (*model_states.pt) or of PyTorch's distributed checkpoints (.metadata). Name the file itself."
        )
    if files[0].suffix == ".safetensors":  # a folder may hold both kinds, of the same weights
        files = [file for file in files if file.suffix == ".safetensors"]
    state = {}
    for file in files:
        state |= dict(_flat(_file(file)))
    return state


def _of_deepspeed(folder: Path) -> dict[str, torch.Tensor]:
    """What DeepSpeed's engine saved, at any stage of ZeRO; by its own converter, which reads values only then."""
    from lockstep.strategies._deepspeed import values_only

    states = sorted(folder.rglob("*model_states.pt"))
    tags = sorted({file.parent for file in states})
    if len(tags) > 1:
        latest = folder / "latest"  # as DeepSpeed writes it
        named = folder / latest.read_text(encoding="utf-8").strip() if latest.is_file() else None
        if named not in tags:
            raise BadInput(
                f"{folder}: holds {len(tags)} checkpoints of DeepSpeed. Name one: {_listed(map(str, tags))}."
            )
        tags = [named]
    (tag,) = tags
    with values_only(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        if any(tag.glob("*optim_states.pt")):
            from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

            return get_fp32_state_dict_from_zero_checkpoint(str(tag.parent), tag=tag.name)
        return dict(_flat(torch.load(states[0], map_location="cpu", weights_only=True)["module"]))


def _is_sharded(file: Path) -> bool:
    with safe_open(file, "pt") as opened:
        return SHARDED in (opened.metadata() or {})


def _of_pytorch(reader: dcp.StorageReader) -> dict[str, torch.Tensor]:
    """What torch.distributed.checkpoint saved; optimizers' states are left on the disk."""
    stored = {
        name: about
        for name, about in reader.read_metadata().state_dict_metadata.items()
        if isinstance(about, TensorStorageMetadata) and ".state." not in name
    }
    state = {name: torch.empty(about.size, dtype=about.properties.dtype) for name, about in stored.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process loads it is meant
        dcp.load(state, storage_reader=reader, no_dist=True)
    return state


class _Reader(dcp.FileSystemReader):
    """Reads the index of a checkpoint, which is a pickle, without running what stands in it."""

    def read_metadata(self, *_, **__):
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _Values(file).load()
        return metadata


class _Values(pickle.Unpickler):
    """Knows what such an index is made of, and no other class or function."""

    def find_class(self, module, name):
        if module == "pathlib":
            return PurePath  # which names a file, and opens none
        of_torch = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if of_torch or name in INDEX.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its index names {module}.{name}, which is no value")


def _blank(model: Path, labels: list[str] | None, notes: list[str]) -> torch.nn.Module:
    """A model of the class and size of the one stored in a folder; with a head for `labels`, if they are given."""
    if not models.is_stored(model):
        raise BadInput(f"{model}: is not a model folder (no config.json). Name the folder of the model.")
    if labels is None:
        if models.task_name(model) is None:
            raise BadInput(
                f"{model}: its config.json names a model without a classifier. Name the classes by their numbers, as in"
                " --labels bad,good."
            )
        return models.build(model)
    return models.classifier(model, labels, notes)


def _labels(model: Path) -> list[str] | None:
    return None if models.task_name(model) == "language-modelling" else models.labels(model)


def _copy_beside(model: Path, folder: Path) -> None:
    """The tokenizer of a model's folder, or what says how its images are read, into another."""
    if (model / "tokenizer_config.json").is_file() or (model / "vocab.txt").is_file():
        models.tokenizer(model).save_pretrained(folder)
    for name in ("images.json", "preprocessor_config.json"):
        if (model / name).is_file():
            (folder / name).write_bytes((model / name).read_bytes())


def _listed(names: Iterable[str]) -> str:
    names = [name or "no name" for name in names]
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
