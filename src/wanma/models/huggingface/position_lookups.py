"""Lookups of positions in a learned table of a transformers model, traced by value on the meta device.

Some families count from another number than 0 when they are given no positions (RoBERTa: from after the
padding token), and use given positions unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from wanma.torch_internals.dispatch import TorchDispatchMode, operator_schema, tree_leaves, tree_map


class PositionLookupTracer(TorchDispatchMode):
    """Dispatch mode that records table rows looked up by integers that the forward itself computes.

    Args:
        limit: elements of the largest integer tensor whose values are traced.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.rows: dict[int, Tensor] = {}
        """Rows looked up, (..., sequence) on the CPU, by identity of the table."""
        self.tables: dict[int, Tensor] = {}
        self._limit = limit
        self._values: dict[int, tuple[Tensor, Tensor]] = {}
        """Tensor without memory, kept alive, and its values, by identity of the tensor."""

    def set_values(self, tensor: Tensor, values: Tensor) -> None:
        """Set the values that a tensor without memory stands for."""
        self._values[id(tensor)] = tensor, values

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.embedding.default:
            if id(args[1]) in self._values:
                self.tables[id(args[0])] = args[0]
                self.rows[id(args[0])] = self._values[id(args[1])][1]
        elif isinstance(result, Tensor) and not result.dtype.is_floating_point:
            if operator_schema(func).is_mutable:
                self._values.clear()  # a change in place is not traced
            elif self._is_traceable(func, result, args, kwargs or {}):
                with suppress(Exception):  # a result that cannot be computed here is not traced
                    self.set_values(
                        result, func(*self._traced_values(args), **self._traced_values(kwargs or {}))
                    )
        return result

    def _is_traceable(self, func: Any, result: Tensor, args: Any, kwargs: Mapping[str, Any]) -> bool:
        input_tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        return (
            result.numel() <= self._limit
            and torch.Tag.nondeterministic_seeded not in func.tags
            and all(id(tensor) in self._values for tensor in input_tensors)
            and "empty" not in str(func)
        )

    def _traced_values(self, arguments: Any) -> Any:
        def known(value: Any) -> Any:
            if isinstance(value, Tensor):
                return self._values[id(value)][1]
            return torch.device("cpu") if isinstance(value, torch.device) else value

        return tree_map(known, arguments)


def first_position(without_positions: PositionLookupTracer, with_positions: PositionLookupTracer) -> int:
    """Return the number from which a model counts its positions if it is given none.

    Args:
        without_positions: lookups of a forward without positions.
        with_positions: lookups of one with positions from 0.
    """
    for table, rows in without_positions.rows.items():
        if table in with_positions.rows and with_positions.rows[table].shape[-1] == rows.shape[-1]:
            differences = (rows - with_positions.rows[table]).flatten()
            if bool((differences == differences[0]).all()) and int(differences[0]) != 0:
                return int(differences[0])
    return 0


def max_sequence_length(without_positions: PositionLookupTracer) -> int | None:
    """Return the number of tokens for which every table has rows; None: all of the forward's."""
    too_short = [
        rows.shape[-1] - (int(rows.max()) + 1 - len(without_positions.tables[table]))
        for table, rows in without_positions.rows.items()
        if int(rows.max()) >= len(without_positions.tables[table])
    ]
    return min(too_short, default=None)
