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
class Part:
    """Elements `start` to `stop` of the buffer, sent to or received from rank `peer` of the group."""

    peer: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Exchange:
    """Parts that one rank sends and receives at the same time; an empty part is None.

    Where it does both, the two parts do not overlap or are added up.
    """

    sent: Part | None
    received: Part | None
    adds: bool = False
    """True if received elements are added to those in the buffer; else they replace them."""


Schedule = Callable[[int, int, int], Iterator[Exchange]]
"""Function (rank, ranks, elements) that yields the exchanges of this rank, in order."""


def ring_reduce_scatter(me: int, ranks: int, elements: int) -> Iterator[Exchange]:
    """Yield a ring reduce-scatter: rank r ends with the sum of chunk r.

    Each chunk goes around the ring once, and every rank adds its own to it.
    """
    after, before = (me + 1) % ranks, (me - 1) % ranks
    for step in range(ranks - 1):
        sent = _part(after, me - step - 1, ranks, elements)
        yield from _exchange(sent, _part(before, me - step - 2, ranks, elements), adds=True)


def ring_all_gather(me: int, ranks: int, elements: int) -> Iterator[Exchange]:
    """Yield a ring all-gather: rank r has chunk r, and all ranks end with all chunks."""
    after, before = (me + 1) % ranks, (me - 1) % ranks
    for step in range(ranks - 1):
        sent = _part(after, me - step, ranks, elements)
        yield from _exchange(sent, _part(before, me - step - 1, ranks, elements))


def ring_all_reduce(me: int, ranks: int, elements: int) -> Iterator[Exchange]:
    """Yield a ring all-reduce: 2 (n − 1) steps, in which each rank sends 2 (n − 1) / n of the buffer.

    No all-reduce sends less.
    """
    yield from ring_reduce_scatter(me, ranks, elements)
    yield from ring_all_gather(me, ranks, elements)


def tree_broadcast(me: int, ranks: int, elements: int) -> Iterator[Exchange]:
    """Yield a binomial-tree broadcast: all ranks end with rank 0's buffer after ⌈log₂ n⌉ steps.

    In each step all ranks that have the buffer pass it on.
    """
    bit = 1 << (ranks - 1).bit_length()
    while bit := bit >> 1:
        if me % (2 * bit) == 0 and me + bit < ranks:
            yield from _exchange(_whole(me + bit, elements), None)
        elif me % (2 * bit) == bit:
            yield from _exchange(None, _whole(me - bit, elements))


def tree_all_reduce(me: int, ranks: int, elements: int) -> Iterator[Exchange]:
    """Yield a binomial-tree all-reduce: sum towards rank 0, then broadcast; 2 ⌈log₂ n⌉ steps.

    Each step sends the whole buffer. Few steps and few messages (2 (n − 1) in all) suit buffers whose time is
    latency.
    """
    bit = 1
    while bit < ranks:
        if me % (2 * bit) == bit:
            yield from _exchange(_whole(me - bit, elements), None)
            break
        if me + bit < ranks:
            yield from _exchange(None, _whole(me + bit, elements), adds=True)
        bit *= 2
    yield from tree_broadcast(me, ranks, elements)


def halving_doubling_all_reduce(me: int, ranks: int, elements: int) -> Iterator[Exchange]:
    """Yield Rabenseifner's all-reduce: recursive halving with growing distance, and back.

    It takes 2 log₂ n steps and, as a ring does, sends 2 (n − 1) / n of the buffer from each rank. The largest
    messages go to the nearest ranks.

    If the number of ranks is no power of two, some ranks give their buffer to a neighbour first and get the
    result last (Thakur et al. 2005, section 4.5): two more steps, of the whole buffer.
    """
    power = 1 << (ranks.bit_length() - 1)
    pairs = ranks - power
    if me < 2 * pairs:
        if me % 2 == 0:
            yield from _exchange(_whole(me + 1, elements), None)
            yield from _exchange(None, _whole(me + 1, elements))
            return
        yield from _exchange(None, _whole(me - 1, elements), adds=True)
    number = me // 2 if me < 2 * pairs else me - pairs

    def rank_of(other: int) -> int:
        return 2 * other + 1 if other < pairs else other + pairs

    start, stop, bit = 0, elements, 1
    windows: list[tuple[int, int, int, int, int]] = []
    while bit < power:
        middle = (start + stop) // 2
        low, high = (start, middle), (middle, stop)
        kept, given = (high, low) if number & bit else (low, high)
        peer = rank_of(number ^ bit)
        yield from _exchange(Part(peer, *given), Part(peer, *kept), adds=True)
        windows.append((peer, *kept, *given))
        (start, stop), bit = kept, 2 * bit
    for peer, kept_start, kept_stop, given_start, given_stop in reversed(windows):
        yield from _exchange(Part(peer, kept_start, kept_stop), Part(peer, given_start, given_stop))
    if me < 2 * pairs:
        yield from _exchange(_whole(me - 1, elements), None)


def chunk(number: int, ranks: int, elements: int) -> tuple[int, int]:
    """Return the first element of chunk `number` and the one after its last.

    The buffer is cut as evenly as possible into one chunk for each rank.
    """
    return number * elements // ranks, (number + 1) * elements // ranks


def _part(peer: int, number: int, ranks: int, elements: int) -> Part:
    return Part(peer, *chunk(number % ranks, ranks, elements))


def _whole(peer: int, elements: int) -> Part:
    return Part(peer, 0, elements)


def _exchange(sent: Part | None, received: Part | None, *, adds: bool = False) -> Iterator[Exchange]:
    """Yield one exchange of the parts that are not empty; yield nothing if both are."""
    sent, received = sent or None, received or None  # a part without elements is false
    if sent is not None or received is not None:
        yield Exchange(sent, received, adds)
