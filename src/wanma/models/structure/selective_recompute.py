"""Policy of selective recompute: the expensive operators whose results are saved."""

from __future__ import annotations

from typing import Any

import torch

from wanma.torch_internals import operators

MATMUL_OPERATORS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
        operators.scaled_mm.default,
        operators.aten_grouped_mm.default,
    }
)
"""Matrix products, of which every second one is saved.

Half of them run again, for about half of the memory (as in torchtitan,
`distributed/activation_checkpoint.py`).
"""

SAVED_OPERATORS = frozenset(
    {
        operators.flash_attention.default,
        operators.cpu_flash_attention.default,
        operators.efficient_attention.default,
        operators.cudnn_attention.default,
        operators.overrideable_attention.default,
        torch.ops.aten.convolution.default,
        # Collectives that other ranks would have to repeat.
        operators.functional_collectives.reduce_scatter_tensor.default,
        operators.functional_collectives.all_to_all_single.default,
    }
)


class SelectiveRecomputePolicy:
    """Policy that decides, operator by operator of one run of a block, if the result is saved."""

    def __init__(self) -> None:
        self._matmul_count = 0

    def must_save(self, operator: Any) -> bool:
        if operator in MATMUL_OPERATORS:
            self._matmul_count += 1
            return self._matmul_count % 2 == 1
        return operator in SAVED_OPERATORS
