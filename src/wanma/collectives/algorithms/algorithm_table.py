"""Table of collective algorithms made of point-to-point messages, and the executor of their schedules.

    ALGORITHMS["all_reduce"]["halving_doubling"](buffer, group, [range(group.size())])

`communication_schedules` says which messages an algorithm has; here they are sent. A backend's own all-reduce
is usually a ring, whose steps grow with the ranks: over links with high latency rather than low bandwidth,
log₂ n steps take less time (`wanma bench collectives` measures where). Sums are made in the schedule's order,
so that all ranks have the same bits, and have them again the next time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.collectives.algorithms.communication_schedules import (
    CommunicationSchedule,
    PeerSlice,
    SendReceive,
    halving_doubling_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_all_reduce,
    tree_broadcast,
)
from wanma.collectives.algorithms.hierarchical_all_reduce import RanksByNode, hierarchical_all_reduce
from wanma.job.errors import WanmaError

Algorithm = Callable[[Tensor, dist.ProcessGroup, RanksByNode], None]
"""Function that runs a collective in place on a contiguous buffer of one dimension.

All ranks of the group call it, with equally many elements and the same list of nodes.

all_reduce: the buffer becomes the sum of all ranks' buffers. reduce_scatter: this rank's chunk does
(`communication_schedules.compute_chunk_bounds`); the others are left undefined. all_gather: the buffer has
that chunk, and gets the others. broadcast: it becomes the buffer of the group's rank 0.
"""


def run_schedule(
    schedule: CommunicationSchedule,
    buffer: Tensor,
    group: dist.ProcessGroup,
    timeout: timedelta | None = None,
) -> None:
    """Execute this rank's part of a communication schedule.

    Args:
        schedule: generator of the exchanges of one rank.
        buffer: (elements,), contiguous.
        group: process group whose ranks execute the same schedule.
        timeout: limit of each message; default: the group's.

    Raises:
        ValueError: the buffer is no contiguous tensor of one dimension.
        WanmaError: a peer is gone or does not answer; names its rank.
    """
    if buffer.ndim != 1 or not buffer.is_contiguous():
        raise ValueError(f"a buffer of one dim, contiguous, is exchanged in place (given: {buffer.shape})")
    scratch: Tensor | None = None
    with torch.no_grad():
        for exchange in schedule(group.rank(), group.size(), buffer.numel()):
            receive_slice = exchange.receive
            if receive_slice is None:
                _send_and_receive(exchange, buffer, None, group, timeout)
                continue
            target = buffer[receive_slice.start : receive_slice.stop]
            if not exchange.reduces:
                _send_and_receive(exchange, buffer, target, group, timeout)
                continue
            if scratch is None or scratch.numel() < len(receive_slice):
                scratch = torch.empty_like(target)
            incoming = scratch[: len(receive_slice)]
            _send_and_receive(exchange, buffer, incoming, group, timeout)
            target.add_(incoming)


def _send_and_receive(
    step: SendReceive,
    buffer: Tensor,
    receive_buffer: Tensor | None,
    group: dist.ProcessGroup,
    timeout: timedelta | None,
) -> None:
    """Send and receive the two parts of an exchange at once, and wait until both are done."""
    messages: list[tuple[PeerSlice, bool, Tensor]] = []
    if step.receive is not None and receive_buffer is not None:
        messages.append((step.receive, False, receive_buffer))
    if step.send is not None:
        messages.append((step.send, True, buffer[step.send.start : step.send.stop]))
    if buffer.device.type != "cpu":
        # NCCL starts both of a pair's messages together, or each would wait for the other.
        operations = [
            dist.P2POp(dist.isend if is_sent else dist.irecv, tensor, group=group, group_peer=part.peer)
            for part, is_sent, tensor in messages
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return
    in_flight = []
    for part, is_sent, tensor in messages:
        try:
            begin = group.send if is_sent else group.recv
            in_flight.append((part, is_sent, begin([tensor], part.peer, 0)))
        except RuntimeError as error:
            raise _peer_error(part.peer, is_sent, group, error) from error
    for part, is_sent, work in in_flight:
        try:
            if timeout is None:
                work.wait()
            else:
                work.wait(timeout)
        except RuntimeError as error:
            raise _peer_error(part.peer, is_sent, group, error) from error


def _peer_error(peer: int, is_sent: bool, group: dist.ProcessGroup, error: RuntimeError) -> WanmaError:
    peer_rank, own_rank = (dist.get_global_rank(group, rank) for rank in (peer, group.rank()))
    failure = "receives nothing from" if is_sent else "sends nothing to"
    return WanmaError(
        f"rank {peer_rank} {failure} rank {own_rank}: {error}",
        f"read the end of rank {peer_rank}'s log, and check the network between the two nodes",
    )


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
