"""Inputs and targets of tokens as tensors."""

from __future__ import annotations

import torch
from contents import Batch
from torch import Tensor


def split(rows: Tensor) -> Batch:
    """Return inputs and targets (rows, sequence) of tokens (rows, sequence + 1)."""
    wide = rows.to(torch.int64)
    return wide[:, :-1].contiguous(), wide[:, 1:].contiguous()
