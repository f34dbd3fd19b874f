"""Attention's core and its mask as modules of their own, without parameters.

A model calls them; context parallelism (`parallel/context/context_parallel.py`) puts others in their place.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class AttentionMask(nn.Module):
    """From documents to what `DotProductAttention` takes as its mask; once per forward, for all blocks."""

    def forward(self, documents: Tensor | None) -> Tensor | None:
        """Who sees whom: earlier tokens of the same document, and oneself.

        Args:
            documents: (rows, sequence), number of the document each token belongs to; None: a row is one.

        Returns:
            (rows, 1, sequence, sequence) bool, true where attention is allowed; None: all earlier tokens.
        """
        if documents is None:
            return None
        same = documents.unsqueeze(2) == documents.unsqueeze(1)
        return same.tril_().unsqueeze(1)


class DotProductAttention(nn.Module):
    """Causal attention in which several query heads may share a key and value head."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None = None
    ) -> Tensor:
        """(rows, sequence, heads, head_width) to the same, with the value's width.

        Args:
            key: (rows, sequence, key/value heads, head_width), and so is value.
            mask: of `AttentionMask`.
            scale: of the scores; None: 1 / sqrt(head_width).
        """
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2),  # (rows, heads, sequence, head_width)
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return attended.transpose(1, 2)
