"""LoRA by peft: each layer gets an update that is the product of two low-rank matrices, and only those are trained.

A classifier's head is trained in full, and all other weights are frozen (Hu et al. 2021, arXiv:2106.09685). What is
trained is decided here for every strategy, before its framework wraps the model (rank/session.py).
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lockstep.config.sections import Train
from lockstep.errors import RunFailed, brief
from lockstep.model import batch_norm, importing, models

if TYPE_CHECKING:  # peft takes long to import, and most rows do not use it
    from peft import PeftModel

HEAD = {"pooler", "pre_classifier", "classifier", "classification_head", "score"}  # transformers' names of heads
EVERY_LINEAR = "all-linear"  # peft's name for all linear layers
UNUSED = "bitsandbytes"  # peft imports it if it is installed, for layers in 8 bits; that takes long
NAME = "default"  # peft's name of a model's only adapter


@importing.hidden(UNUSED)
def load() -> None:
    """Import peft now, since it takes long; later imports of it are then free."""
    importlib.import_module("peft")


def put_into(model: torch.nn.Module, train: Train) -> torch.nn.Module:
    """Add LoRA's adapter to the model's layers as `train` says, in place; without `train.lora` nothing changes.

    The model keeps its class, and all weights but the adapter's and the head's are frozen. Raises RunFailed if peft
    can't adapt the model.
    """
    if not train.lora:
        return model
    # In evaluation PyTorch's encoder layers take a fast path that reads the weights directly and skips the adapter.
    torch.backends.mha.set_fastpath_enabled(False)
    return adapted(model, train).get_base_model()


@importing.hidden(UNUSED)
def adapted(model: torch.nn.Module, train: Train) -> PeftModel:
    """`model` with the adapter in its layers, inside peft's wrapper.

    One matrix of each update is initialised with zeros, the other with the same random numbers on all ranks and in all
    runs. Batch normalisation is trained too, since its running statistics change in training anyway.
    """
    import peft

    heads = heads_of(model)
    normalising = [path for path, module in model.named_modules() if batch_norm.depends_on_batch(module)]
    name = type(model).__name__
    kind = peft.TaskType.SEQ_CLS if name.endswith("ForSequenceClassification") else None
    asked = peft.LoraConfig(
        task_type=peft.TaskType.CAUSAL_LM if models.is_causal_name(name) else kind,
        r=train.lora,
        lora_alpha=_alpha(train),
        lora_dropout=train.lora_dropout,
        target_modules=_targets(model, train.lora_targets, heads),
        modules_to_save=[*sorted({head.split(".")[-1] for head in heads}), *normalising] or None,
    )
    with torch.random.fork_rng(devices=[]), _quietly():
        torch.default_generator.manual_seed(0)  # of the CPU, where the model is now; a GPU's dropout is not affected
        try:
            return peft.get_peft_model(model, asked)
        except (ValueError, TypeError, NotImplementedError) as error:
            if train.lora_targets is None:
                why = f"peft does not know which layers of {name} to update; name some of them by lora_targets"
                raise RunFailed(f"lora: {why}: {_listed(model, heads)}") from None
            raise RunFailed(f"lora_targets: peft can't update these layers of {name}: {brief(error)}") from None


@importing.hidden(UNUSED)
def take_out(model: torch.nn.Module, state: dict[str, torch.Tensor], train: Train, folder: Path) -> dict:
    """Merge the adapter in `state` into the weights of `model`, and return the plain model's state dict.

    The adapter and the head are also written to `folder` in peft's format.

    Args:
        model: with the weights that training began with.
        state: the state dict of a trained model that `put_into` returned.

    Raises RunFailed if the initial weights and the stored adapter do not reproduce `state`.
    """
    import peft

    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wrapper = adapted(model, train)
    wrapper.get_base_model().load_state_dict(state, strict=True)
    with _quietly():
        wrapper.save_pretrained(folder, save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)  # peft's empty template of a model card
        merged = {name: tensor.clone() for name, tensor in wrapper.merge_and_unload().state_dict().items()}
        model.load_state_dict(base, strict=True)
        again = peft.PeftModel.from_pretrained(model, folder).get_base_model().state_dict()
    if models.hash_weights(again) != models.hash_weights(state):
        other = [name for name, tensor in state.items() if not torch.equal(tensor.cpu(), again[name])]
        raise RunFailed(
            f"{folder}: the adapter on the initial weights does not reproduce the trained model: {other[0]} differs. A"
            " weight that LoRA freezes has changed; please report it."
        )
    return merged


def live(model: torch.nn.Module) -> dict:
    """The settings of LoRA (`lora`, `lora_alpha`, `lora_dropout`, `lora_targets`) read back from a live model.

    A value in which layers differ is a list of all their values.
    """
    layers = {path: module for path, module in model.named_modules() if hasattr(module, "lora_A")}
    if not layers:
        return {"lora": 0}
    each = {
        "lora": {layer.r[NAME] for layer in layers.values()},
        "lora_alpha": {layer.scaling[NAME] * layer.r[NAME] for layer in layers.values()},
        "lora_dropout": {getattr(layer.lora_dropout[NAME], "p", 0.0) for layer in layers.values()},
    }
    values = {key: found.pop() if len(found) == 1 else sorted(found) for key, found in each.items()}
    return values | {"lora_targets": sorted({path.split(".")[-1] for path in layers})}


def asked(train: Train) -> dict:
    """What `live` must return for these settings; without `lora_targets` if peft chooses the layers."""
    if not train.lora:
        return {"lora": 0}
    values = {"lora": train.lora, "lora_alpha": _alpha(train), "lora_dropout": train.lora_dropout}
    if train.lora_targets in (None, [EVERY_LINEAR]):
        return values
    return values | {"lora_targets": sorted({name.split(".")[-1] for name in train.lora_targets})}


def is_in(model: torch.nn.Module) -> bool:
    """Whether a model has an adapter."""
    return live(model)["lora"] != 0


def count_trained(model: torch.nn.Module) -> int:
    """The number of parameters that are trained."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


@contextlib.contextmanager
def _quietly():
    """Suppress warnings of peft that need no action."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out")  # peft corrects it itself for GPT-2's layers
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        yield


def _alpha(train: Train) -> float:
    return train.lora_alpha or train.lora


def heads_of(model: torch.nn.Module) -> list[str]:
    """The paths of the modules that are trained in full: those with a name in HEAD, or else the last linear layer.

    A causal model without such a name has no head here, since its last layer may be the embedding. Nor is a layer taken
    whose path ends another module's path, since peft selects modules by the ends of their paths.
    """
    paths = [path for path, _ in model.named_modules()]
    named = [path for path in paths if path.split(".")[-1] in HEAD]
    if named or models.is_causal_name(type(model).__name__):
        return named
    last = [path for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)][-1:]
    tied = {name.rpartition(".")[0] for pair in models.tied_names(model).items() for name in pair}
    return [path for path in last if path not in tied and sum(other.endswith(path) for other in paths) == 1]


def _layers(model: torch.nn.Module, heads: list[str]) -> dict[str, torch.nn.Module]:
    """The layers that LoRA can adapt, by path: those with a weight matrix, outside of the head."""
    kinds = (torch.nn.Linear, torch.nn.Embedding, torch.nn.modules.conv._ConvNd)
    # nn.MultiheadAttention reads the weight of this layer without calling it, so an adapter would have no effect.
    never_called = torch.nn.modules.linear.NonDynamicallyQuantizableLinear
    return {
        path: module
        for path, module in model.named_modules()
        if (isinstance(module, kinds) or type(module).__name__ == "Conv1D")  # GPT-2's
        and not isinstance(module, never_called)
        and not any(f"{path}.".startswith(f"{head}.") for head in heads)
    }


def _targets(model: torch.nn.Module, names: list[str] | None, heads: list[str]) -> list[str] | None:
    """The layers to adapt, in the form that peft takes. Raises RunFailed if one of `names` is not such a layer."""
    if names is None:
        return None
    layers, tied = _layers(model, heads), models.tied_names(model)
    shared = {name.rpartition(".")[0] for pair in tied.items() for name in pair}
    if names == [EVERY_LINEAR]:
        embedding = torch.nn.Embedding
        return [path for path, layer in layers.items() if not isinstance(layer, embedding) and path not in shared]
    if EVERY_LINEAR in names:
        raise RunFailed(f"lora_targets: {EVERY_LINEAR} stands alone: leave it out, or the names beside it")
    for name in names:
        paths = [path for path in layers if f".{path}".endswith(f".{name}")]
        if not paths:
            whole = any(f".{path}".endswith(f".{name}") for path in heads)
            why = "is the head, which is trained in full" if whole else "names no layer of the model"
            raise RunFailed(f"lora_targets: {name} {why}. There are: {_listed(model, heads)}")
        if both := [path for path in paths if path in shared]:
            raise RunFailed(
                f"lora_targets: {name}: the weight of {both[0]} is tied to another layer's, so an update of one layer"
                " can't be merged into it. Name other layers"
            )
    return names


def sizes(model: torch.nn.Module) -> dict[str, int]:
    """The layers that LoRA can adapt, by path, with the highest rank of an update: the smaller side of the matrix."""
    layers = _layers(model, heads_of(model))
    return {path: min(layer.weight.shape[0], layer.weight[0].numel()) for path, layer in layers.items()}


def _listed(model: torch.nn.Module, heads: list[str]) -> str:
    return ", ".join(sorted({path.split(".")[-1] for path in _layers(model, heads)}))
