"""Pretrained models of transformers: fetched from the hub or read from a folder, with a head for the task at hand."""

from __future__ import annotations

import contextlib
import pickle
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from lockstep.data.labels import listed
from lockstep.errors import BadInput, brief
from lockstep.model import heads, padding
from lockstep.model.models import LOCAL, require_weights

if TYPE_CHECKING:  # training needs no configuration, and starts sooner without it
    from lockstep.config.sections import Model

# What is fetched of a model: configuration and tokenizer, then weights in the better of the two formats that it has.
SMALL = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
MADE_ANEW = ("position_ids", "token_type_ids")  # buffers that older versions stored
WEIGHTS = (["model.safetensors", "model-*.safetensors"], ["pytorch_model.bin", "pytorch_model-*.bin"])


def load(
    auto: type, model: Model, notes: list[str] | None, labels: list[str] | None = None, tokenizer=None
) -> torch.nn.Module:
    """The pretrained model, by one of transformers' classes for a task (`auto`, as AutoModelForSequenceClassification).

    With `labels`, under a head for them: the one that it has is kept, in their order, where it tells the same ones
    apart; where not, `notes` is told. With a `tokenizer` (of texts), both pad by the same token from then on.
    Raises BadInput where the model can't be had, or its files don't belong together.
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
        raise BadInput(f"model.name: {model.name}: {body[0]} has another shape than its config.json says.")
    if others and labels is None:
        name = next(iter(others))
        raise BadInput(f"model.name: {model.name}: {name} has another shape than its config.json says.")
    _require_body(pretrained, report["missing_keys"], model.name, notes)
    body = f"{pretrained.base_model_prefix}."  # heads of another task are expected, and left out
    unused = sorted(
        name for name in report["unexpected_keys"] if name.startswith(body) and not name.endswith(MADE_ANEW)
    )
    if unused:
        notes.append(f"{model.name}: its config.json has no place for {listed(unused)}, which is left out")
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
            notes.append(
                f"{model.name} is called a classifier, and its files hold no head of this form: it gets a new one"
            )
        return pretrained
    return heads.fitted(pretrained, output, own_labels, labels, model.name, notes)


def require_embeddings(pretrained: torch.nn.Module, name: str, tokens: int) -> None:
    """Raises BadInput where a model has fewer embeddings than its tokenizer has tokens."""
    have = pretrained.get_input_embeddings().num_embeddings
    if have < tokens:
        raise BadInput(
            f"model.name: {name}: has embeddings for {have} tokens, and its tokenizer has {tokens}. Give it its own"
            " tokenizer."
        )


def _require_body(pretrained: torch.nn.Module, missing, name: str, notes: list[str]) -> None:
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
    if absent:
        others = f" and {len(absent) - 1} more of {len(body)} weights" if absent[1:] else ""
        notes.append(f"{name} holds no {absent[0]}{others}: new ones take their place")


def folder_of(model: Model, patterns: list[str]) -> Path:
    """Where a pretrained model's files of these patterns are: in its own folder, or in the hub's cache.

    Whatever transformers is to read lies in a folder then. Left to fetch by itself it would ask for a file after the
    other, and have a service of the hub's convert a model that has no safetensors, to fetch that one as well.
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
    """What transformers says where a model can't be had, in one line."""
    try:
        yield
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError, pickle.UnpicklingError) as error:
        at = f" at revision {model.revision}" if model.revision else ""
        raise BadInput(f"model.name: {model.name}{at} can't be loaded: {brief(error)}") from None
