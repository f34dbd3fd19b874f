"""Table of collective algorithms made of point-to-point messages, and the executor of their schedules.

    ALGORITHMS["all_reduce"]["halving_doubling"](buffer, group, [range(group.size())])

`communication_schedules` says which messages an algorithm has; here they are sent. A backend's own all-reduce
is usually a ring, whose steps grow with the ranks: over links with high latency rather than low bandwidth,
log₂ n steps take less time (`wanma bench machine` measures where). Sums are made in the schedule's order,
so that all ranks have the same bits, and have them again the next time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.collectives.algorithms.communication_schedules import (
    CommunicationSchedule,
    halving_doubling_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_all_reduce,
    tree_broadcast,
)
from wanma.collectives.algorithms.hierarchical_all_reduce import RanksByNode, hierarchical_all_reduce
from wanma.collectives.algorithms.message_batch import MessageBatch

Algorithm = Callable[[Tensor, dist.ProcessGroup, RanksByNode], None]
"""Function that runs a collective in place on a contiguous buffer of one dimension.

All ranks of the group call it, with equally many elements and the same list of nodes.

all_reduce: the buffer becomes the sum of all ranks' buffers. reduce_scatter: this rank's chunk does
(`communication_schedules.compute_chunk_bounds`); the others are left undefined. all_gather: the buffer has
that chunk, and gets the others. broadcast: it becomes the buffer of the group's rank 0.
"""


def run_schedule(schedule: CommunicationSchedule, buffer: Tensor, group: dist.ProcessGroup) -> None:
    """Execute this rank's part of a communication schedule.

    Args:
        schedule: generator of the exchanges of one rank.
        buffer: (elements,), contiguous.
        group: process group whose ranks execute the same schedule.

    Raises:
        ValueError: the buffer is no contiguous tensor of one dimension.
        WanmaError: a peer is gone or does not answer; names its rank.
    """
    if buffer.ndim != 1 or not buffer.is_contiguous():
        raise ValueError(f"a buffer of one dim, contiguous, is exchanged in place (given: {buffer.shape})")
    scratch: Tensor | None = None
    messages = MessageBatch(group)
    with torch.no_grad():
        for exchange in schedule(group.rank(), group.size(), buffer.numel()):
            sent, received = exchange.send, exchange.receive
            target = incoming = buffer[received.start : received.stop] if received else buffer[:0]
            if exchange.reduces and received:
                if scratch is None or scratch.numel() < len(received):
                    scratch = torch.empty_like(target)
                incoming = scratch[: len(received)]
            if received:
                messages.receive(incoming, received.peer)
            if sent:
                messages.send(buffer[sent.start : sent.stop], sent.peer)
            messages.wait()
            if exchange.reduces:
                target.add_(incoming)


def _algorithm_from(schedule: CommunicationSchedule) -> Algorithm:
    return lambda buffer, group, _nodes: run_schedule(schedule, buffer, group)


ALGORITHMS: Mapping[str, Mapping[str, Algorithm]] = MappingProxyType(
    {
        "all_reduce": {
            "ring": _algorithm_from(ring_all_reduce),
            "tree": _algorithm_from(tree_all_reduce),
            "halving_doubling": _algorithm_from(halving_doubling_all_reduce),
            "hierarchical": hierarchical_all_reduce,
        },
        "all_gather": {"ring": _algorithm_from(ring_all_gather)},
        "reduce_scatter": {"ring": _algorithm_from(ring_reduce_scatter)},
        "all_to_all": {},
        "broadcast": {"tree": _algorithm_from(tree_broadcast)},
    }
)
"""Algorithms by collective and name, without the backend's own; a new algorithm is one more line here."""
