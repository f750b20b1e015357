"""Read somebody else's checkpoint as values only, without running code in it.

It may be a state dict, nested in other data ({"model": ..., "ep": ...}) or saved from a wrapped model (`module.`,
`_orig_mod.`), or a folder of transformers, of DeepSpeed's engine, or of PyTorch's distributed checkpoints, which FSDP
uses. It must contain every tensor of the given model.
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

from lockstep.data import images, segments
from lockstep.errors import BadInput, brief
from lockstep.files import atomic_folder
from lockstep.model import models

# Names that wrappers insert into parameter names: DataParallel and DDP; torch.compile; Fabric; FSDP1; checkpointing.
WRAPPERS = {"module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
DERIVED = ("position_ids", "token_type_ids")  # constant buffers that older versions of transformers stored
# The classes and functions in the index of a distributed checkpoint, by module.
INDEX = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    ),
}
SHARDED = "DCP_SHARDING_INFO"  # in the header of safetensors that are part of a distributed checkpoint
SHOWN = 4  # how many names a message lists


def convert(weights: Path, model: Path, destination: Path, labels: list[str] | None) -> list[str]:
    """Convert somebody's `weights` into a model folder with the class and size of the one in `model`; returns notes.

    labels: the names of its classes in the order of their numbers; None takes those of the folder `model`.
    Raises BadInput if a tensor of that model is missing or has another shape.
    """
    notes: list[str] = []
    blank = _blank(model, labels, notes)
    own, tied = blank.state_dict(), models.tied_names(blank)
    names = [name for name in own if name not in tied]
    state, of_weights = read(weights, names, tied)
    if missing := [name for name in names if name not in state]:
        raise BadInput(
            f"{weights}: lacks {_listed(missing)}, {len(missing)} of the {len(names)} tensors of the model in {model}."
            " Name the folder of the model that the weights belong to."
        )
    for name in names:
        if state[name].is_floating_point() != own[name].is_floating_point():
            kind = str(state[name].dtype).removeprefix("torch.")
            raise BadInput(
                f"{weights}: {name} is {kind}, but the model's has another kind of number. Dequantise the weights"
                " first, with the program that quantised them."
            )
        if not state[name].isfinite().all():
            raise BadInput(f"{weights}: {name} holds nan or infinity. Use a checkpoint from before training diverged.")
        if state[name].shape != own[name].shape:
            raise BadInput(
                f"{weights}: {name} is {list(state[name].shape)}, but {list(own[name].shape)} in the model in {model}."
                " Name the folder of the model that it belongs to, and all of its labels."
            )
    for second, first in tied.items():
        stored = state.pop(second, state[first])
        if stored.numel() and not _alike(stored, state[first]):  # DeepSpeed stores the second one without values
            raise BadInput(
                f"{weights}: {first} and {second} differ, but are one tensor in the model in {model}. Name the folder"
                " of a model that has both (tie_word_embeddings: false in its config.json)."
            )
    blank.load_state_dict(models.with_tied(state, tied))
    with atomic_folder(destination) as temporary:
        models.save(blank, temporary, labels or _labels(model))
        _copy_beside(model, temporary)
    return notes + of_weights


def read(weights: Path, names: list[str], tied: Iterable[str] = ()) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors of a checkpoint for a model's parameter `names`, in float32, and notes.

    tied: second names of tensors in `names`, which a checkpoint may have or not (models.tied_names).
    Raises BadInput if the checkpoint can't be read as values, or contains several such models.
    """
    if not weights.exists():
        raise BadInput(f"--weights: {weights} does not exist.")
    try:
        stored = _folder(weights) if weights.is_dir() else dict(_flat(_file(weights)))
    except BadInput:
        raise
    except Exception as error:  # pickle, zipfile, safetensors, DeepSpeed and PyTorch each raise their own
        raise BadInput(
            f"{weights}: can't be read as tensors only: {brief(error)}. Save only the model's state_dict(), where"
            " it was trained."
        ) from None
    for name, tensor in stored.items():
        if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
            kind = "without values (meta)" if tensor.is_meta else "sparse or quantised"
            raise BadInput(f"{weights}: {name} is a tensor {kind}. Save it as a dense tensor of floats.")
    found = _matched(stored, names, [*names, *tied], weights)
    if eighths := [name for name in found.values() if _in_8_bits(stored[name])]:
        raise BadInput(
            f"{weights}: {eighths[0]} is a tensor in 8 bits, whose scale is stored elsewhere. Dequantise the weights"
            " first, with the program that quantised them."
        )
    notes = []
    rest = [name for name in stored if name not in found.values() and not name.endswith(DERIVED)]
    if rest:
        notes.append(f"left out, as the model has no such tensors: {_listed(rest)} ({len(rest)} tensors)")
    kinds = {str(stored[name].dtype).removeprefix("torch.") for name in found.values()} - {"float32", "int64", "bool"}
    if kinds:
        notes.append(f"weights in {', '.join(sorted(kinds))} are converted to float32")
    return {name: _single(stored[source]) for name, source in found.items()}, notes


def _in_8_bits(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in a floating-point format of 8 bits, as quantised models have beside tensors of scales."""
    return tensor.is_floating_point() and tensor.element_size() == 1


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same type, shape and values."""
    return one.dtype == other.dtype and torch.equal(one, other)


def _single(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _matched(stored: dict[str, torch.Tensor], needed: list[str], names: list[str], weights: Path) -> dict[str, str]:
    """Map each of the model's names to a stored tensor, which has that name, possibly after a prefix common to all.

    needed: those of `names` without which a checkpoint is not of this model.
    """
    plain = {}
    for source in stored:
        first = plain.setdefault(_unwrapped(source, names), source)
        if first is not source and not _alike(stored[first], stored[source]):
            raise BadInput(
                f"{weights}: holds two such models that differ, as {first} and {source}. Save only the one that is"
                " meant."
            )
    longest = max(needed, key=len)
    beginnings = {name.removesuffix(longest) for name in plain if name == longest or name.endswith(f".{longest}")}
    complete = {
        beginning: {name: plain[beginning + name] for name in names if beginning + name in plain}
        for beginning in beginnings
    }
    if len(complete) > 1:
        raise BadInput(
            f"{weights}: holds such a model {len(complete)} times, under {_listed(sorted(complete))}. Save only the one"
            " that is meant."
        )
    if not complete:
        held = _listed(list(stored)) or "no tensor"
        raise BadInput(
            f"{weights}: holds no tensor called {longest}, which the model has; it holds {held}."
            " Name the folder of the model that it belongs to."
        )
    return next(iter(complete.values()))


def _unwrapped(name: str, names: list[str]) -> str:
    """A tensor's name without the names of wrappers in it, unless the model has a tensor of the full name."""
    return name if name in names else ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _flat(value, above: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in nested dicts, each under its keys joined by dots."""
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
            f"{folder}: holds no weights in a known format: transformers ({' or '.join(models.WEIGHT_FILES)}),"
            " DeepSpeed (*model_states.pt) or PyTorch's distributed checkpoints (.metadata). Name the file itself."
        )
    if files[0].suffix == ".safetensors":  # a folder may have the same weights in both formats
        files = [file for file in files if file.suffix == ".safetensors"]
    state: dict[str, torch.Tensor] = {}
    for file in files:
        part = dict(_flat(_file(file)))
        if other := [name for name in part if name in state and not _alike(part[name], state[name])]:
            raise BadInput(
                f"{folder}: holds {other[0]} in {file.name} and, with other values, in another file. Name the file that"
                " is meant."
            )
        state |= part
    return state


def _of_deepspeed(folder: Path) -> dict[str, torch.Tensor]:
    """Read a checkpoint of DeepSpeed's engine, of any ZeRO stage, by its own converter, restricted to values."""
    from lockstep.strategies._deepspeed import values_only

    tags = sorted({file.parent for file in folder.rglob("*model_states.pt")})
    if len(tags) > 1:
        latest = folder / "latest"  # DeepSpeed's file with the name of the latest checkpoint
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
        state = min(tag.glob("*model_states.pt"))
        return dict(_flat(torch.load(state, map_location="cpu", weights_only=True)["module"]))


def _is_sharded(file: Path) -> bool:
    with safe_open(file, "pt") as opened:
        return SHARDED in (opened.metadata() or {})


def _of_pytorch(reader: dcp.StorageReader) -> dict[str, torch.Tensor]:
    """Read a checkpoint of torch.distributed.checkpoint, without the optimizer's state."""
    stored = {
        name: about
        for name, about in reader.read_metadata().state_dict_metadata.items()
        if isinstance(about, TensorStorageMetadata) and ".state." not in name
    }
    state = {name: torch.empty(about.size, dtype=about.properties.dtype) for name, about in stored.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that a single process loads it, which is intended
        dcp.load(state, storage_reader=reader, no_dist=True)
    return state


class _Reader(dcp.FileSystemReader):
    """Reads the index of a checkpoint, which is a pickle, without running code in it."""

    def read_metadata(self, *_, **__):
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _Values(file).load()
        return metadata


class _Values(pickle.Unpickler):
    """An unpickler that knows only the classes and functions of such an index."""

    def find_class(self, module, name):
        if module == "pathlib":
            return PurePath  # it can name a file, but not open one
        of_torch = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if of_torch or name in INDEX.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its index contains {module}.{name}, which is not a value")


def _blank(model: Path, labels: list[str] | None, notes: list[str]) -> torch.nn.Module:
    """A model with the class and size of the one stored in a folder, with a head for `labels` if they are given.

    It is in float32: transformers may build it in the precision that config.json names, which would round the weights.
    """
    if not models.is_stored(model):
        raise BadInput(f"{model}: is not a model folder (no config.json). Name the folder of the model.")
    if labels is None:
        if models.task_name(model) is None:
            raise BadInput(
                f"{model}: its config.json names a model without a classifier. Name the classes in the order of their"
                " numbers, as in --labels bad,good."
            )
        return models.build(model).float()
    return models.classifier(model, labels, notes).float()


def _labels(model: Path) -> list[str] | None:
    return None if models.task_name(model) == "language-modelling" else models.labels(model)


def _copy_beside(model: Path, folder: Path) -> None:
    """Copy a model's tokenizer, or the files on how it reads images, into another folder."""
    if (model / "tokenizer_config.json").is_file() or (model / "vocab.txt").is_file():
        models.tokenizer(model).save_pretrained(folder)
    for name in (images.ABOUT, segments.ABOUT, "preprocessor_config.json"):
        if (model / name).is_file():
            (folder / name).write_bytes((model / name).read_bytes())


def _listed(names: Iterable[str]) -> str:
    names = [name or "no name" for name in names]
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
