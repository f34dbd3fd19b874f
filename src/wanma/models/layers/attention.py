"""Attention core and attention mask as separate modules, without parameters.

Models call them; context parallelism (`parallel/context/context_parallel.py`) replaces them.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class AttentionMask(nn.Module):
    """Builder of the mask of `DotProductAttention` from documents; once per forward, for all blocks."""

    def forward(self, documents: Tensor | None) -> Tensor | None:
        """Return the mask that allows each token itself and earlier tokens of the same document.

        Args:
            documents: (rows, sequence), number of the document each token belongs to; None: a row is one.

        Returns:
            (rows, 1, sequence, sequence) bool, true where attention is allowed; None: all earlier tokens.
        """
        if documents is None:
            return None
        is_same_document = documents.unsqueeze(2) == documents.unsqueeze(1)
        return is_same_document.tril_().unsqueeze(1)


class DotProductAttention(nn.Module):
    """Attention core: causal attention in which several query heads may share a key and value head."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None = None
    ) -> Tensor:
        """Map (rows, sequence, heads, head_dim) to the same shape, with the value's width.

        Args:
            query: as above.
            key: (rows, sequence, key/value heads, head_dim), and so is value.
            value: likewise.
            mask: result of `AttentionMask`.
            scale: of the scores; None: 1 / sqrt(head_dim).
        """
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2),  # (rows, heads, sequence, head_dim)
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return attended.transpose(1, 2)
