"""Pretrained models of transformers: fetched from the hub or read from a folder, with a head for the task."""

from __future__ import annotations

import contextlib
import pickle
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from lockstep.errors import BadInput, brief, listed
from lockstep.model import heads, padding
from lockstep.model.models import LOCAL, require_weights

if TYPE_CHECKING:  # a training process needs no configuration, and starts sooner without this import
    from lockstep.config.sections import Model

# The files to fetch of a model: configuration and tokenizer, then weights, as safetensors if it has them.
SMALL = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
MADE_ANEW = ("position_ids", "token_type_ids")  # constant buffers that older versions of transformers stored
WEIGHTS = (["model.safetensors", "model-*.safetensors"], ["pytorch_model.bin", "pytorch_model-*.bin"])


def load(
    auto: type, model: Model, notes: list[str] | None, labels: list[str] | None = None, tokenizer=None
) -> torch.nn.Module:
    """The pretrained model, loaded by one of transformers' classes for a task.

    Args:
        auto: that class, such as AutoModelForSequenceClassification.
        labels: the labels of the data. A head with the same labels is kept, in their order; otherwise a new head
            replaces it, with a line in `notes`. None: the model needs no such head.
        tokenizer: is made to use the same padding token as the model.

    Raises BadInput if the model can't be loaded, or its files don't belong together.
    """
    from transformers import AutoConfig

    notes = [] if notes is None else notes
    folder = _with_weights(model)
    with explained(model):
        config = AutoConfig.from_pretrained(folder, **LOCAL)
        if tokenizer is not None:
            padding.agree(config, tokenizer, model.name, notes)
        own_labels = [str(name) for _, name in sorted((config.id2label or {}).items())]
        if labels is not None:
            heads.set_labels(config, labels, model.name, notes)
        pretrained, report = auto.from_pretrained(
            folder,
            config=config,
            **LOCAL,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    others = {name: shape for name, shape, _ in report["mismatched_keys"]}
    if body := [name for name in others if name.startswith(f"{pretrained.base_model_prefix}.")]:
        raise BadInput(f"model.name: {model.name}: {body[0]} has another shape than in its config.json.")
    if others and labels is None:
        name = next(iter(others))
        raise BadInput(f"model.name: {model.name}: {name} has another shape than in its config.json.")
    _require_body(pretrained, report["missing_keys"], model.name, notes)
    body = f"{pretrained.base_model_prefix}."  # unused weights outside the body are another task's head, as expected
    unused = sorted(
        name for name in report["unexpected_keys"] if name.startswith(body) and not name.endswith(MADE_ANEW)
    )
    if unused:
        notes.append(f"{model.name}: {listed(unused)} is left out, as its config.json has no such layer")
    if labels is None:
        return pretrained
    if others:
        classes = next(iter(others.values()))[0]
        mismatch = f"{model.name} ends in a head of {classes} classes, and the data has {len(labels)}"
        notes.append(f"{mismatch}: a new head replaces it")
        return pretrained
    output = heads.output_name(pretrained, len(labels))
    if output is None or any(name.startswith(f"{output}.") for name in report["missing_keys"]):
        if report["missing_keys"] and (config.architectures or [""])[0].endswith("Classification"):
            notes.append(f"{model.name} is named a classifier, but its files hold no such head: it gets a new one")
        return pretrained
    return heads.fitted(pretrained, output, own_labels, labels, model.name, notes)


def require_embeddings(pretrained: torch.nn.Module, name: str, tokens: int) -> None:
    """Raise BadInput if a model has fewer embeddings than its tokenizer has tokens."""
    have = pretrained.get_input_embeddings().num_embeddings
    if have < tokens:
        raise BadInput(
            f"model.name: {name} has embeddings for {have} tokens, but its tokenizer has {tokens}. Give it its own"
            " tokenizer."
        )


def _require_body(pretrained: torch.nn.Module, missing, name: str, notes: list[str]) -> None:
    """Raise BadInput if the weights file held no weight of the model's body; note any other missing weights.

    transformers initialises missing weights at random, and only warns.
    """
    body = [key for key, _ in pretrained.named_parameters() if key.startswith(f"{pretrained.base_model_prefix}.")]
    absent = [key for key in body if key in missing]
    if body and absent == body:
        raise BadInput(
            f"model.name: {name}: its weights file holds neither {body[0]} nor any other weight of the model in its"
            " config.json. Name a model whose files belong together."
        )
    if absent:
        others = f" and {len(absent) - 1} more of {len(body)} weights" if absent[1:] else ""
        notes.append(f"{name} holds no {absent[0]}{others}: they are initialised at random")


def folder_of(model: Model, patterns: list[str]) -> Path:
    """The folder with a pretrained model's files of these patterns: the user's folder, or one in the hub's cache.

    transformers then reads a complete local folder. By itself it would request one file after the other, and would
    start a conversion on the hub for a model without safetensors.
    """
    if Path(model.name).is_dir():
        return Path(model.name)
    from lockstep.data import hub

    return hub.fetch_model(model.name, model.revision, patterns)


def _with_weights(model: Model) -> Path:
    folder = folder_of(model, [*SMALL, *WEIGHTS[0]])
    if not any(folder.glob("*.safetensors")):
        folder = folder_of(model, [*SMALL, *WEIGHTS[1]])
    require_weights(folder, f"model.name: {model.name}")
    return folder


@contextlib.contextmanager
def explained(model: Model):
    """Turn transformers' errors about a model that can't be loaded into BadInput, in one line."""
    try:
        yield
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError, pickle.UnpicklingError) as error:
        at = f" at revision {model.revision}" if model.revision else ""
        raise BadInput(f"model.name: {model.name}{at} can't be loaded: {brief(error)}") from None
