"""Torch's own count of FLOPs, with the one operator that it does not know."""

from __future__ import annotations

from typing import Any

import torch


def attention_on_cpu() -> dict[Any, Any]:
    """FLOPs of fused attention on CPUs, forward and backward; causal attention counts half of its scores."""

    def forward(query: torch.Size, key: torch.Size, value: torch.Size, *options: Any, **_: Any) -> int:
        # Options are dropout, is_causal; torch leaves out what is at its default.
        return _flops(query, key, value, bool(len(options) > 1 and options[1]))

    def backward(
        _: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *rest: Any, **__: Any
    ) -> int:
        causal = next((option for option in rest if isinstance(option, bool)), False)
        return 5 * _flops(query, key, value, causal) // 2

    return {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: forward,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }


def _flops(query: torch.Size, key: torch.Size, value: torch.Size, causal: bool) -> int:
    rows, heads, queries, width = query
    products = rows * heads * queries * key[-2] * (width + value[-1])
    return products if causal else 2 * products
