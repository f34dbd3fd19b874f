"""Lookups of tokens beside the input embedding of a transformers model, traced on the meta device.

Some families have a second table of tokens, for each block (Gemma 3n). Given embeddings in place of
tokens they leave it out, and compute another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from wanma.torch_internals.dispatch import TorchDispatchMode, tree_leaves
from wanma.torch_internals.operators import to_copy


def reads_tokens(model: PreTrainedModel, sequence_length: int, **keywords: Any) -> bool:
    """Return True if a forward of `model`, on the meta device, looks tokens up in another table.

    Args:
        model: the transformers model.
        sequence_length: in tokens.
        keywords: more of the forward's arguments.
    """
    tokens = torch.zeros(1, sequence_length, dtype=torch.int64, device="meta")
    positions = torch.arange(sequence_length, device="meta").unsqueeze(0)
    reads = _TokenLookupMode(tokens, model.get_input_embeddings().weight)
    # A forward that reads values fails here: tables of tokens come first.
    with suppress(Exception), torch.no_grad(), reads:
        model(input_ids=tokens, position_ids=positions, use_cache=False, **keywords)
    return reads.reads_other_table


class _TokenLookupMode(TorchDispatchMode):
    """Dispatch mode that traces tokens through pointwise operators to the tables they are looked up in."""

    def __init__(self, tokens: Tensor, embedding: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.reads_other_table = False
        self._embedding = embedding
        self._traced = {id(tokens): tokens}
        """Traced tensors by identity, and so kept alive."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        input_tensors = (value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor))
        if not any(id(tensor) in self._traced for tensor in input_tensors):
            return result
        is_by_token = torch.Tag.pointwise in func.tags or func.is_view or func in _COPY_OPERATORS
        if func is torch.ops.aten.embedding.default:
            self.reads_other_table = self.reads_other_table or args[0] is not self._embedding
        elif is_by_token and isinstance(result, Tensor) and not result.dtype.is_floating_point:
            self._traced[id(result)] = result
        return result


_COPY_OPERATORS = (to_copy.default, torch.ops.aten.clone.default)
