"""The head of a pretrained classifier: whether it has the labels of the data, and in which order."""

import re

import torch

from lockstep.data.labels import spelling
from lockstep.errors import listed

NO_NAME = re.compile(r"LABEL_\d+")  # transformers' default names of labels
ONE_LABEL = "single_label_classification"  # the problem_type that Lockstep trains


def set_labels(config, labels: list[str], name: str, notes: list[str]) -> None:
    """Set a model's configuration to what is trained: these labels, one for each sample."""
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: number for number, label in enumerate(labels)}
    kind = getattr(config, "problem_type", None)
    if kind not in (None, ONE_LABEL):
        notes.append(f"{name} was made for {kind.replace('_', ' ')}; here it is trained to give each sample one label")
    config.problem_type = ONE_LABEL
    if getattr(config, "function_to_apply", None):  # transformers' pipeline applies it to the logits
        config.function_to_apply = "softmax"


def output_name(model: torch.nn.Module, classes: int) -> str | None:
    """The name of the output layer: the last module whose weight has one row per class. None if there is none."""
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(weight := getattr(module, "weight", None), torch.Tensor)
        and weight.ndim > 1
        and weight.shape[0] == classes
        and not name.startswith(f"{model.base_model_prefix}.")
    ]
    return names[-1] if names else None


def fitted(
    model: torch.nn.Module, output: str, own_labels: list[str], labels: list[str], name: str, notes: list[str]
) -> torch.nn.Module:
    """The model with its head in the order of `labels`, or with a new head if it has other labels.

    output: the name of the output layer, whose rows are in the order of `own_labels`.
    """
    own, wanted = ([spelling(label) for label in names] for names in (own_labels, labels))
    if sorted(own) != sorted(wanted) or len(set(wanted)) < len(wanted):
        unnamed = all(NO_NAME.fullmatch(label) for label in own_labels)
        has = "labels without names" if unnamed else f"the labels {listed(own_labels)}"
        notes.append(f"{name} ends in a head for {has}, and the data has {listed(labels)}: a new head replaces it")
        return _with_new_head(model)
    order = [own.index(label) for label in wanted]
    if order != list(range(len(order))):
        module = model.get_submodule(output)
        with torch.no_grad():
            for parameter in (module.weight, getattr(module, "bias", None)):
                if parameter is not None:
                    parameter.copy_(parameter[order].clone())
        notes.append(f"the head of {name} is reordered from {listed(own_labels)} to {listed(labels)}")
    return model


def _with_new_head(model: torch.nn.Module) -> torch.nn.Module:
    """A model of the same class and configuration that keeps the weights of the body; all others are new."""
    fresh = type(model)(model.config)
    body = {key: value for key, value in model.state_dict().items() if key.startswith(f"{model.base_model_prefix}.")}
    fresh.load_state_dict(body, strict=False)
    return fresh
