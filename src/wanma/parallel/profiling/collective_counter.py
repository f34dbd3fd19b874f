"""Counter of a step's collectives, each with the ranks of its group and the bytes it moves."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.parallel.context.ring_attention import ring_message_bytes
from wanma.torch_internals.dispatch import TorchDispatchMode, operator_schema, tree_leaves
from wanma.torch_internals.distributed import resolve_process_group
from wanma.torch_internals.operators import (
    ALL_GATHER_BASE,
    FUNCTIONAL_COLLECTIVES,
    FUNCTIONAL_COLLECTIVES_WITH_AUTOGRAD,
    REDUCE_SCATTER_BASE,
)

_KINDS = {
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_coalesced": "all-reduce",
    ALL_GATHER_BASE: "all-gather",
    "allgather_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "all_gather_into_tensor_coalesced": "all-gather",
    REDUCE_SCATTER_BASE: "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "reduce_scatter_tensor_coalesced": "reduce-scatter",
    "alltoall_": "all-to-all",
    "alltoall_base_": "all-to-all",
    "all_to_all_single": "all-to-all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "send": "send",
    "recv_": "receive",
}
_NAMESPACES = ("c10d", FUNCTIONAL_COLLECTIVES, FUNCTIONAL_COLLECTIVES_WITH_AUTOGRAD)


@dataclass(frozen=True)
class CollectiveCall:
    """Kind of collective that one rank issues in a step."""

    operation: str
    group_ranks: tuple[int, ...]
    """Ranks of its process group."""
    tensor_bytes: int
    """Bytes of the full tensor that is gathered, reduced or exchanged; of a message, bytes sent."""


class CollectiveCounter(TorchDispatchMode):
    """Counter of the collectives that run within the context, as torch dispatches them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.counts: Counter[CollectiveCall] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        ring, messages = ring_message_bytes(func, args)
        for size in messages:
            for direction in ("send", "receive"):
                self.counts[CollectiveCall(direction, _ranks([ring]), size)] += 1
        name = operator_schema(func).name.partition("::")[2]
        kind = _KINDS.get(name) if func.namespace in _NAMESPACES else None
        if kind is not None:
            leaves = tree_leaves((args, kwargs))
            sizes = [leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, Tensor)]
            ranks = _ranks(leaves)
            # The functional forms are given their input alone; a gather's output is as many times larger.
            gathers = func.namespace != "c10d" and kind == "all-gather"
            size = max(sizes, default=0) * (len(ranks) if gathers else 1)
            if len(ranks) > 1:
                self.counts[CollectiveCall(kind, ranks, size)] += 1
        return func(*args, **kwargs)


def _ranks(leaves: list[Any]) -> tuple[int, ...]:
    """Return the ranks of the process group among an operation's arguments: an object, or a group's name."""
    for leaf in leaves:
        if isinstance(leaf, torch.ScriptObject):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(leaf)))
        if isinstance(leaf, dist.ProcessGroup):
            return tuple(dist.get_process_group_ranks(leaf))
    for leaf in reversed(leaves):
        if isinstance(leaf, str):
            try:
                return tuple(dist.get_process_group_ranks(resolve_process_group(leaf)))
            except (RuntimeError, ValueError):
                continue  # another text argument, such as the reduction's name
    return ()
