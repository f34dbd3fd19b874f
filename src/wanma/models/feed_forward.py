"""The feed-forward network of a decoder's block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, width, bias=False)
        self.up = nn.Linear(hidden, width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) to the same."""
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result
