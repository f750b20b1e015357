"""A tokenised split in a device's memory: batches are assembled there, and only sample ids are copied per step."""

import numpy as np
import torch

from lockstep.data.tokens import Tokens


class ResidentTokens:
    """The tokens of all texts of a split, concatenated on `device`, with each text's start, length and label."""

    def __init__(self, tokens: Tokens, device: torch.device):
        token_ids, starts = tokens.flat(np.arange(len(tokens))), np.cumsum(tokens.lengths) - tokens.lengths
        self.token_ids = torch.tensor(token_ids, device=device)
        self.starts = torch.tensor(starts, device=device)
        self.lengths = torch.tensor(tokens.lengths, device=device)
        self.labels = torch.tensor(tokens.labels, device=device)
        self.pad_id = tokens.pad_id

    def batch(self, ids: torch.Tensor, width: int) -> dict[str, torch.Tensor]:
        """The same batch as `Tokens.batch`, assembled on the device. ids: int64 [n], on the device."""
        columns = torch.arange(width, device=ids.device)
        mask = columns < self.lengths[ids, None]
        positions = torch.where(mask, self.starts[ids, None] + columns, 0)
        token_ids = torch.where(mask, self.token_ids[positions], self.pad_id)
        return {"input_ids": token_ids.long(), "attention_mask": mask.long(), "labels": self.labels[ids]}
