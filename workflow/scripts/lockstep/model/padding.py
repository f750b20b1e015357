"""Make a model and its tokenizer agree on a padding token, and measure whether padding changes a model's output."""

import numpy as np
import torch

from lockstep.errors import BadInput

COMPARED = 4  # texts that are computed both with padding and without
ROUNDING = 1e-4  # as a share of the largest score; reordered sums in float32 differ by a hundredth of it


def agree(config, tokenizer, name: str, notes: list[str]) -> None:
    """Make a pretrained model's `config` and its tokenizer use the same padding token, before the model is created.

    The model's token wins, since its positions may be counted from it and its classifier may look for it. If neither
    has one, the end-of-text token is used, as is usual for GPT-2. Raises BadInput if there is no such token either.
    """
    text = config.get_text_config()
    of_model, of_tokenizer = getattr(text, "pad_token_id", None), tokenizer.pad_token_id
    if of_model is not None and not 0 <= of_model < len(tokenizer):
        of_model = None
    if of_model is None and of_tokenizer is None:
        token = tokenizer.eos_token or tokenizer.unk_token
        if token is None:
            raise BadInput(
                f"model.name: {name}: neither its config.json (pad_token_id) nor its tokenizer has a padding token or"
                " an end-of-text token. Add one to its tokenizer_config.json (pad_token)."
            )
        tokenizer.pad_token = token
        notes.append(f"{name} and its tokenizer name no padding token, so {token!r} is used")
    elif of_model is not None and of_model != of_tokenizer:
        was = "none" if of_tokenizer is None else repr(tokenizer.pad_token)
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(of_model)
        notes.append(f"{name} pads with {tokenizer.pad_token!r}, as its config.json says; its tokenizer named {was}")
    text.pad_token_id = tokenizer.pad_token_id


def influence(model: torch.nn.Module, samples) -> float:
    """How much padding changes a sample's scores, as a share of the largest score; 0 within float32's rounding.

    The shortest samples are computed alone, and again in a batch with the longest one.
    """
    order = np.argsort(samples.lengths, kind="stable")
    longest = int(order[-1])
    width, largest, moved = int(samples.lengths[longest]), 0.0, 0.0
    short = [at for at in order[:COMPARED] if samples.lengths[at] < width]
    if not short:
        return 0.0
    training = model.training
    model.eval()
    together = scores(model, samples, np.append(short, longest), width)
    for row, at in enumerate(short):
        own = int(samples.lengths[at])
        alone = scores(model, samples, np.array([at]), own)[0]
        # A language model has scores for each token: compare those of the sample, not those of its padding.
        beside = together[row][:own] if alone.ndim > 1 else together[row]
        largest = max(largest, alone.abs().max().item())
        moved = max(moved, (alone - beside).abs().max().item())
    model.train(training)
    change = moved / largest if largest else 0.0
    return change if change > ROUNDING else 0.0


@torch.no_grad()
def scores(model: torch.nn.Module, samples, ids: np.ndarray, width: int) -> torch.Tensor:
    """The scores of samples `ids`, padded to `width`, on the model's device: float [len(ids), ...]."""
    device, arrays = next(model.parameters()).device, samples.batch(ids, width)
    batch = {name: torch.from_numpy(array).to(device) for name, array in arrays.items() if name != "labels"}
    outputs = model(**batch)
    return getattr(outputs, "logits", outputs)
