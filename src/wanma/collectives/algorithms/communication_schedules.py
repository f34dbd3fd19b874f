"""Who sends what to whom, in which order, for collectives made of messages between two ranks: pure data.

    for exchange in ring_all_reduce(me, ranks, elements): ...

A schedule is a function of the rank, the number of ranks and the number of elements alone, so that every
rank derives its own part and all parts fit together. Which sums are made of what, and in which order, follows
from it too: every rank ends with the same bits, run after run.

Sources: rings and recursive halving and doubling as in Thakur, Rabenseifner and Gropp 2005, "Optimization of
Collective Communication Operations in MPICH", sections 3 and 4; trees as in its section 4.4 (binomial).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """Elements `start` to `stop` of the buffer, to or from rank `peer` of the group."""

    peer: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Exchange:
    """What one rank sends and receives at the same time; what has no elements is None.

    Where it does both, the two parts do not overlap or are added up.
    """

    sent: Part | None
    received: Part | None
    adds: bool = False
    """What is received is added to what is there; else it replaces that."""


Schedule = Callable[[int, int, int], Iterator[Exchange]]
"""(rank, ranks, elements) -> this rank's exchanges."""


def ring_reduce_scatter(me: int, ranks: int, elements: int) -> Iterator[Exchange]:
    """Rank r ends with the sum of chunk r: each chunk goes around once, and every rank adds its own to it."""
    after, before = (me + 1) % ranks, (me - 1) % ranks
    for step in range(ranks - 1):
        sent = _part(after, me - step - 1, ranks, elements)
        yield from _exchange(sent, _part(before, me - step - 2, ranks, elements), adds=True)


def ring_all_gather(me: int, ranks: int, elements: int) -> Iterator[Exchange]:
    """All ranks end with all chunks, of which rank r had chunk r."""
    after, before = (me + 1) % ranks, (me - 1) % ranks
    for step in range(ranks - 1):
        sent = _part(after, me - step, ranks, elements)
        yield from _exchange(sent, _part(before, me - step - 1, ranks, elements))


def ring_all_reduce(me: int, ranks: int, elements: int) -> Iterator[Exchange]:
    """2 (n − 1) steps, and 2 (n − 1) / n of the buffer sent by each rank: the least that can be sent."""
    yield from ring_reduce_scatter(me, ranks, elements)
    yield from ring_all_gather(me, ranks, elements)


def tree_broadcast(me: int, ranks: int, elements: int) -> Iterator[Exchange]:
    """All ranks end with rank 0's buffer, after ⌈log₂ n⌉ steps: in each, all that have it pass it on."""
    bit = 1 << (ranks - 1).bit_length()
    while bit := bit >> 1:
        if me % (2 * bit) == 0 and me + bit < ranks:
            yield from _exchange(_whole(me + bit, elements), None)
        elif me % (2 * bit) == bit:
            yield from _exchange(None, _whole(me - bit, elements))


def tree_all_reduce(me: int, ranks: int, elements: int) -> Iterator[Exchange]:
    """Added up towards rank 0, and passed on from there: 2 ⌈log₂ n⌉ steps of the whole buffer.

    Few steps and few messages (2 (n − 1) in all), for buffers whose time is latency.
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
    """Rabenseifner's: recursive halving with growing distance, and back: 2 log₂ n steps and, as in a ring,
    2 (n − 1) / n of the buffer. The largest messages go to the nearest ranks.

    Of other numbers of ranks than powers of two, some give their buffer to a neighbour first and get the
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
    """First element of chunk `number` of a buffer cut for `ranks`, and that after its last; as even as can
    be."""
    return number * elements // ranks, (number + 1) * elements // ranks


def _part(peer: int, number: int, ranks: int, elements: int) -> Part:
    return Part(peer, *chunk(number % ranks, ranks, elements))


def _whole(peer: int, elements: int) -> Part:
    return Part(peer, 0, elements)


def _exchange(sent: Part | None, received: Part | None, *, adds: bool = False) -> Iterator[Exchange]:
    """One exchange of what is not empty; none where nothing is left."""
    sent, received = sent or None, received or None  # a part without elements is false
    if sent is not None or received is not None:
        yield Exchange(sent, received, adds)
