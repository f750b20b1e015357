"""LoRA: a model's queries and values are changed by products of two thin matrices, and those are trained, by peft.

A classifier's head is trained too; all other weights stay as they are (Hu et al. 2021, arXiv:2106.09685).
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from lockstep.errors import RunFailed
from lockstep.model.models import is_causal_name

if TYPE_CHECKING:  # importing it takes long, and most rows do without
    from peft import PeftModel

HEAD = {"pooler", "pre_classifier", "classifier", "score"}  # what models call what follows the encoder


def adapted(model: torch.nn.Module, rank: int) -> PeftModel:
    """peft's wrapper around `model`, in which it has put updates of this rank, and frozen all else but the head.

    Its `get_base_model()` is the model, of the same class as before, with the updates beside its matrices. An update's
    one matrix begins as zero; the other alike on all ranks and in all runs, as the model does.
    """
    import peft

    ends = {name.split(".")[-1] for name, _ in model.named_modules()}
    causal = is_causal_name(type(model).__name__)
    asked = peft.LoraConfig(
        task_type=peft.TaskType.CAUSAL_LM if causal else peft.TaskType.SEQ_CLS,
        r=rank,
        lora_alpha=rank,  # updates count once, at any rank
        modules_to_save=sorted(ends & HEAD) or None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # the model is not on its device yet, whose dropout stays as it is
        try:
            return peft.get_peft_model(model, asked)
        except ValueError as error:
            raise RunFailed(
                f"lora: peft can't adapt {model.config.model_type}; take lora: 0. It says: {error}"
            ) from None


def merged(wrapper: PeftModel) -> dict[str, torch.Tensor]:
    """The state dict of the plain model, with the updates added to its matrices.

    Of a copy: the live model goes on training its updates apart.
    """
    return copy.deepcopy(wrapper).merge_and_unload().state_dict()


def rank_of(model: torch.nn.Module) -> int:
    """The largest rank of the updates that a live model has; 0 if it has none."""
    ranks = {len(weight) for name, weight in model.named_parameters() if ".lora_A." in name}
    return max(ranks, default=0)
