"""Communication schedules of collectives made of point-to-point messages; pure data, no communication.

    for exchange in ring_all_reduce(me, ranks, elements): ...

A schedule is a function of the rank, the number of ranks and the number of elements alone, so that every rank
derives its own part and all parts fit together. The order of the sums follows from it, too: every rank ends
with the same bits, run after run.

Sources: rings and recursive halving and doubling as in Thakur, Rabenseifner and Gropp 2005, "Optimization of
Collective Communication Operations in MPICH", sections 3 and 4; trees as in its section 4.4 (binomial).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class PeerSlice:
    """Elements `start` to `stop` of the buffer, sent to or received from rank `peer` of the group."""

    peer: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class SendReceive:
    """Parts that one rank sends and receives at the same time; an empty part is None.

    Where it does both, the two parts do not overlap or are added up.
    """

    send: PeerSlice | None
    receive: PeerSlice | None
    reduces: bool = False
    """True if received elements are added to those in the buffer; else they replace them."""


CommunicationSchedule = Callable[[int, int, int], Iterator[SendReceive]]
"""Function (rank, ranks, elements) that yields the exchanges of this rank, in order."""


def ring_reduce_scatter(rank: int, group_size: int, elements: int) -> Iterator[SendReceive]:
    """Yield a ring reduce-scatter: rank r ends with the sum of chunk r.

    Each chunk goes around the ring once, and every rank adds its own to it.
    """
    next_rank, previous_rank = (rank + 1) % group_size, (rank - 1) % group_size
    for step in range(group_size - 1):
        send_slice = _chunk_slice(next_rank, rank - step - 1, group_size, elements)
        yield from _send_receive(
            send_slice, _chunk_slice(previous_rank, rank - step - 2, group_size, elements), reduces=True
        )


def ring_all_gather(rank: int, group_size: int, elements: int) -> Iterator[SendReceive]:
    """Yield a ring all-gather: rank r has chunk r, and all ranks end with all chunks."""
    next_rank, previous_rank = (rank + 1) % group_size, (rank - 1) % group_size
    for step in range(group_size - 1):
        send_slice = _chunk_slice(next_rank, rank - step, group_size, elements)
        yield from _send_receive(
            send_slice, _chunk_slice(previous_rank, rank - step - 1, group_size, elements)
        )


def ring_all_reduce(rank: int, group_size: int, elements: int) -> Iterator[SendReceive]:
    """Yield a ring all-reduce: 2 (n − 1) steps, in which each rank sends 2 (n − 1) / n of the buffer.

    No all-reduce sends less.
    """
    yield from ring_reduce_scatter(rank, group_size, elements)
    yield from ring_all_gather(rank, group_size, elements)


def tree_broadcast(rank: int, group_size: int, elements: int) -> Iterator[SendReceive]:
    """Yield a binomial-tree broadcast: all ranks end with rank 0's buffer after ⌈log₂ n⌉ steps.

    In each step all ranks that have the buffer pass it on.
    """
    bit = 1 << (group_size - 1).bit_length()
    while bit := bit >> 1:
        if rank % (2 * bit) == 0 and rank + bit < group_size:
            yield from _send_receive(_buffer_slice(rank + bit, elements), None)
        elif rank % (2 * bit) == bit:
            yield from _send_receive(None, _buffer_slice(rank - bit, elements))


def tree_all_reduce(rank: int, group_size: int, elements: int) -> Iterator[SendReceive]:
    """Yield a binomial-tree all-reduce: sum towards rank 0, then broadcast; 2 ⌈log₂ n⌉ steps.

    Each step sends the whole buffer. Few steps and few messages (2 (n − 1) in all) suit buffers whose time is
    latency.
    """
    bit = 1
    while bit < group_size:
        if rank % (2 * bit) == bit:
            yield from _send_receive(_buffer_slice(rank - bit, elements), None)
            break
        if rank + bit < group_size:
            yield from _send_receive(None, _buffer_slice(rank + bit, elements), reduces=True)
        bit *= 2
    yield from tree_broadcast(rank, group_size, elements)


def halving_doubling_all_reduce(rank: int, group_size: int, elements: int) -> Iterator[SendReceive]:
    """Yield Rabenseifner's all-reduce: recursive halving with growing distance, and back.

    It takes 2 log₂ n steps and, as a ring does, sends 2 (n − 1) / n of the buffer from each rank. The largest
    messages go to the nearest ranks.

    If the number of ranks is no power of two, some ranks give their buffer to a neighbour first and get the
    result last (Thakur et al. 2005, section 4.5): two more steps, of the whole buffer.
    """
    power = 1 << (group_size.bit_length() - 1)
    pairs = group_size - power
    if rank < 2 * pairs:
        if rank % 2 == 0:
            yield from _send_receive(_buffer_slice(rank + 1, elements), None)
            yield from _send_receive(None, _buffer_slice(rank + 1, elements))
            return
        yield from _send_receive(None, _buffer_slice(rank - 1, elements), reduces=True)
    number = rank // 2 if rank < 2 * pairs else rank - pairs

    def rank_of(index: int) -> int:
        return 2 * index + 1 if index < pairs else index + pairs

    start, stop, bit = 0, elements, 1
    windows: list[tuple[int, int, int, int, int]] = []
    while bit < power:
        middle = (start + stop) // 2
        low, high = (start, middle), (middle, stop)
        kept_range, sent_range = (high, low) if number & bit else (low, high)
        peer = rank_of(number ^ bit)
        yield from _send_receive(PeerSlice(peer, *sent_range), PeerSlice(peer, *kept_range), reduces=True)
        windows.append((peer, *kept_range, *sent_range))
        (start, stop), bit = kept_range, 2 * bit
    for peer, kept_start, kept_stop, sent_start, sent_stop in reversed(windows):
        yield from _send_receive(
            PeerSlice(peer, kept_start, kept_stop), PeerSlice(peer, sent_start, sent_stop)
        )
    if rank < 2 * pairs:
        yield from _send_receive(_buffer_slice(rank - 1, elements), None)


def compute_chunk_bounds(index: int, group_size: int, elements: int) -> tuple[int, int]:
    """Return the first element of chunk `index` and the one after its last.

    The buffer is cut as evenly as possible into one chunk for each rank.
    """
    return index * elements // group_size, (index + 1) * elements // group_size


def _chunk_slice(peer: int, index: int, group_size: int, elements: int) -> PeerSlice:
    return PeerSlice(peer, *compute_chunk_bounds(index % group_size, group_size, elements))


def _buffer_slice(peer: int, elements: int) -> PeerSlice:
    return PeerSlice(peer, 0, elements)


def _send_receive(
    send: PeerSlice | None, receive: PeerSlice | None, *, reduces: bool = False
) -> Iterator[SendReceive]:
    """Yield one exchange of the parts that are not empty; yield nothing if both are."""
    send, receive = send or None, receive or None  # a part without elements is false
    if send is not None or receive is not None:
        yield SendReceive(send, receive, reduces)
