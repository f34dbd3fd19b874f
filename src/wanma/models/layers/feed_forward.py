"""Feed-forward network of a decoder's block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from wanma.models.config.dimensions import DecoderConfig


def build_feed_forward(config: DecoderConfig) -> nn.Module:
    """Build the network of width `config.feed_forward` that processes every token."""
    kind = FeedForward if config.activation_function == "swiglu" else GeluFeedForward
    return kind(config.hidden, config.feed_forward)


class FeedForward(nn.Module):
    """SwiGLU feed-forward network (Shazeer 2020)."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, width, bias=False)
        self.up = nn.Linear(hidden, width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., hidden) to the same shape."""
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class GeluFeedForward(nn.Module):
    """Feed-forward network of two matrices with tanh-approximated GELU between (Radford et al. 2019)."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., hidden) to the same shape."""
        result: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return result
