"""LoRA: layers are changed by products of two thin matrices, and those are trained, by peft.

A classifier's head is trained too, whole; all other weights stay as they are (Hu et al. 2021, arXiv:2106.09685). What
is trained is decided here for every strategy, before its framework wraps the model (rank/session.py).
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
from lockstep.model import batch_norm, lean, models

if TYPE_CHECKING:  # importing it takes long, and most rows do without
    from peft import PeftModel

HEAD = {"pooler", "pre_classifier", "classifier", "classification_head", "score"}  # as transformers calls it
EVERY_LINEAR = "all-linear"  # a word of peft's
UNUSED = "bitsandbytes"  # which peft looks for, to update layers in 8 bits, and which takes long to import
NAME = "default"  # of the one set of updates that a model has, as peft calls it


@lean.hidden(UNUSED)
def load() -> None:
    """Import peft, which takes long; later it is there."""
    importlib.import_module("peft")


def put_into(model: torch.nn.Module, train: Train) -> torch.nn.Module:
    """The model with the updates that `train` asks for beside its layers, in place; unchanged where it asks for none.

    It is of the same class as before, and all but the updates and the head is frozen. Raises RunFailed where it can't
    be changed so.
    """
    if not train.lora:
        return model
    # In evaluation PyTorch's own encoder layers read their weights, and call none of the layers that have updates.
    torch.backends.mha.set_fastpath_enabled(False)
    return adapted(model, train).get_base_model()


@lean.hidden(UNUSED)
def adapted(model: torch.nn.Module, train: Train) -> PeftModel:
    """peft's wrapper around `model`, in which it has put the updates.

    An update's one matrix begins as zero; the other alike on all ranks and in all runs, as the model does. Modules with
    batch normalisation are trained too, since what they count in training changes with them.
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
        torch.default_generator.manual_seed(0)  # the model is not on its device yet, whose dropout stays as it is
        try:
            return peft.get_peft_model(model, asked)
        except (ValueError, TypeError, NotImplementedError) as error:
            if train.lora_targets is None:
                why = f"peft does not know which layers of {name} to update; name some of them by lora_targets"
                raise RunFailed(f"lora: {why}: {_listed(model, heads)}") from None
            raise RunFailed(f"lora_targets: peft can't update these layers of {name}: {brief(error)}") from None


@lean.hidden(UNUSED)
def take_out(model: torch.nn.Module, state: dict[str, torch.Tensor], train: Train, folder: Path) -> dict:
    """The state dict of the plain model, with the updates that are in `state` added to its weights.

    The updates and the head alone are written into `folder`, as peft keeps them. model: with the weights that training
    began with; state: of what `put_into` made of such a model. Raises RunFailed where the two do not come to it.
    """
    import peft

    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wrapper = adapted(model, train)
    wrapper.get_base_model().load_state_dict(state, strict=True)
    with _quietly():
        wrapper.save_pretrained(folder, save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)  # peft's form of a model's card, not filled in
        merged = {name: tensor.clone() for name, tensor in wrapper.merge_and_unload().state_dict().items()}
        model.load_state_dict(base, strict=True)
        again = peft.PeftModel.from_pretrained(model, folder).get_base_model().state_dict()
    if models.hash_weights(again) != models.hash_weights(state):
        other = [name for name, tensor in state.items() if not torch.equal(tensor.cpu(), again[name])]
        raise RunFailed(
            f"{folder}: with the weights that training began with it does not come to the live ones: {other[0]} is"
            " another. What LoRA leaves as it is was changed; please report it."
        )
    return merged


def live(model: torch.nn.Module) -> dict:
    """The keys of `train` about LoRA as a live model has them: of its first updated layer, and which layers those are.

    Where layers differ in a value, it is a list of all.
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
    """What `live` must say where `train` is what is trained; without the layers where those are peft's to choose."""
    if not train.lora:
        return {"lora": 0}
    values = {"lora": train.lora, "lora_alpha": _alpha(train), "lora_dropout": train.lora_dropout}
    if train.lora_targets in (None, [EVERY_LINEAR]):
        return values
    return values | {"lora_targets": sorted({name.split(".")[-1] for name in train.lora_targets})}


def is_in(model: torch.nn.Module) -> bool:
    """Whether a model has such updates."""
    return live(model)["lora"] != 0


def count_trained(model: torch.nn.Module) -> int:
    """How many numbers are trained."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


@contextlib.contextmanager
def _quietly():
    """Without warnings of peft's that ask for nothing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out")  # of GPT-2's layers, which it then sets itself
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        yield


def _alpha(train: Train) -> float:
    return train.lora_alpha or train.lora


def heads_of(model: torch.nn.Module) -> list[str]:
    """The paths of the modules that are trained whole: those that transformers calls so.

    Of a network that has none of these names it is the last linear layer, but for a causal model's, which may be its
    embedding, and one that peft can't tell from others, as it looks for the ends of paths.
    """
    paths = [path for path, _ in model.named_modules()]
    named = [path for path in paths if path.split(".")[-1] in HEAD]
    if named or models.is_causal_name(type(model).__name__):
        return named
    last = [path for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)][-1:]
    tied = {name.rpartition(".")[0] for pair in models.tied_names(model).items() for name in pair}
    return [path for path in last if path not in tied and sum(other.endswith(path) for other in paths) == 1]


def _layers(model: torch.nn.Module, heads: list[str]) -> dict[str, torch.nn.Module]:
    """What LoRA can update: layers with a matrix, outside of the head, which is trained whole."""
    kinds = (torch.nn.Linear, torch.nn.Embedding, torch.nn.modules.conv._ConvNd)
    never_called = torch.nn.modules.linear.NonDynamicallyQuantizableLinear  # of nn.MultiheadAttention, which reads it
    return {
        path: module
        for path, module in model.named_modules()
        if (isinstance(module, kinds) or type(module).__name__ == "Conv1D")  # GPT-2's
        and not isinstance(module, never_called)
        and not any(f"{path}.".startswith(f"{head}.") for head in heads)
    }


def _targets(model: torch.nn.Module, names: list[str] | None, heads: list[str]) -> list[str] | None:
    """The layers that `names` name, for peft. Raises RunFailed where one of them names none, or what can't be one."""
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
            why = "is the head, which is trained whole" if whole else "names no layer of the model"
            raise RunFailed(f"lora_targets: {name} {why}. There are: {_listed(model, heads)}")
        if both := [path for path in paths if path in shared]:
            raise RunFailed(
                f"lora_targets: {name}: the weight of {both[0]} is another layer's too (tied), so an update of one of"
                " them can't be added to it. Name other layers"
            )
    return names


def sizes(model: torch.nn.Module) -> dict[str, int]:
    """The layers that LoRA can update, by their paths, and the smaller side of each one's matrix."""
    layers = _layers(model, heads_of(model))
    return {path: min(layer.weight.shape[0], layer.weight[0].numel()) for path, layer in layers.items()}


def _listed(model: torch.nn.Module, heads: list[str]) -> str:
    return ", ".join(sorted({path.split(".")[-1] for path in _layers(model, heads)}))
