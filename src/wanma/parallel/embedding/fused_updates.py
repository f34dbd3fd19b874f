"""Updates of rows of embedding tables in compiled code: weights and state in one pass through memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from wanma.models.recommender.row_updates import ROW_RULES, RowUpdate
from wanma.parallel.embedding.native_rows import rows_library

_FUSED_STATES = {"adagrad": "sum", "rowwise_adagrad": "row_sum"}
"""State of the rules that compiled code computes."""


@torch.no_grad()
def update_rows(rule: str, matrix: Tensor, states: Mapping[str, Tensor], update: RowUpdate) -> None:
    """Update rows of a matrix (rows, width) and their states in place, by a rule of `ROW_RULES`."""
    native, state = None, states.get(_FUSED_STATES.get(rule, ""))
    factors = (update.rate, update.decay)  # tensors where tables differ
    if state is not None and not any(isinstance(each, Tensor) for each in factors) and update.decay == 0:
        native = rows_library(matrix, state, update.gradient)
    if native is None or state is None:
        ROW_RULES[rule].apply(matrix, states, update)
        return
    rows, gradient = update.rows.contiguous(), update.gradient.contiguous()
    getattr(native, f"wanma_{rule}")(
        *(matrix.data_ptr(), matrix.stride(0), state.data_ptr(), state.stride(0), matrix.shape[1]),
        *(rows.data_ptr(), len(rows), gradient.data_ptr()),
        *(update.rate, update.epsilon, torch.get_num_threads()),
    )
