"""Schedules of messages, followed by ranks on paper: nothing is sent, and nobody waits for ever."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wanma.collectives.algorithms.communication_schedules import (
    CommunicationSchedule,
    SendReceive,
    compute_chunk_bounds,
    halving_doubling_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_all_reduce,
    tree_broadcast,
)

ALL_REDUCES = {
    "ring": ring_all_reduce,
    "tree": tree_all_reduce,
    "halving_doubling": halving_doubling_all_reduce,
}


@dataclass
class Rank:
    """One rank's part, and how far it is."""

    number: int
    buffer: list[frozenset[int]]
    """Contributions to each element: the ranks whose numbers have been added up."""
    todo: list[SendReceive]
    is_sent: bool = False
    landed: list[frozenset[int]] | None = None
    messages: int = 0
    sent_elements: int = 0
    rounds: int = 0


def follow(schedule: CommunicationSchedule, ranks: int, elements: int, start: str = "own") -> list[Rank]:
    """Let all ranks follow `schedule`; each waits until what it sends has been taken, as Gloo does.

    Args:
        start: what a rank has at first: its own number in every element, in its chunk, or (rank 0) in all.
    """
    everyone = []
    for me in range(ranks):
        first, last = compute_chunk_bounds(me, ranks, elements)
        own = frozenset({me})
        has = {
            "own": [own] * elements,
            "chunk": [own if first <= at < last else frozenset() for at in range(elements)],
            "root": [own if me == 0 else frozenset()] * elements,
        }[start]
        everyone.append(Rank(me, list(has), list(schedule(me, ranks, elements))))
    while any(rank.todo for rank in everyone):
        moved = [_match(rank, everyone) for rank in everyone]
        done = [_complete(rank) for rank in everyone]
        assert any(moved) or any(done), "everybody waits for somebody"
    return everyone


def _match(rank: Rank, everyone: list[Rank]) -> bool:
    if not rank.todo or rank.is_sent or (sent := rank.todo[0].send) is None:
        return False
    other = everyone[sent.peer]
    taken = other.todo[0].receive if other.todo else None
    if taken is None or taken.peer != rank.number or other.landed is not None:
        return False
    assert (sent.start, sent.stop) == (taken.start, taken.stop), "both ends speak of the same elements"
    other.landed = rank.buffer[sent.start : sent.stop]
    rank.is_sent = True
    rank.messages += 1
    rank.sent_elements += len(sent)
    return True


def _complete(rank: Rank) -> bool:
    if not rank.todo:
        return False
    one = rank.todo[0]
    if (one.send is not None and not rank.is_sent) or (one.receive is not None and rank.landed is None):
        return False
    if one.receive is not None and rank.landed is not None:
        for at, arrived in enumerate(rank.landed, one.receive.start):
            here = rank.buffer[at]
            assert not (one.reduces and here & arrived), "nobody's number is added twice"
            rank.buffer[at] = here | arrived if one.reduces else arrived
    rank.todo.pop(0)
    rank.is_sent, rank.landed = False, None
    rank.rounds += 1
    return True


@settings(deadline=None)
@given(st.sampled_from(sorted(ALL_REDUCES)), st.integers(1, 17), st.integers(0, 40))
def test_every_rank_ends_with_every_ranks_number_once(name: str, ranks: int, elements: int) -> None:
    everything = frozenset(range(ranks))
    for rank in follow(ALL_REDUCES[name], ranks, elements):
        assert rank.buffer == [everything] * elements


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(0, 40))
def test_a_scatter_leaves_each_rank_the_sum_of_its_chunk_and_a_gather_everything(
    ranks: int, elements: int
) -> None:
    everything = frozenset(range(ranks))
    for rank in follow(ring_reduce_scatter, ranks, elements):
        first, last = compute_chunk_bounds(rank.number, ranks, elements)
        assert rank.buffer[first:last] == [everything] * (last - first)
    owners = [me for me in range(ranks) for _ in range(*compute_chunk_bounds(me, ranks, elements))]
    for rank in follow(ring_all_gather, ranks, elements, "chunk"):
        assert rank.buffer == [frozenset({owner}) for owner in owners]


@settings(deadline=None)
@given(st.integers(1, 17), st.integers(0, 5))
def test_a_broadcast_reaches_all_in_as_many_steps_as_doublings(ranks: int, elements: int) -> None:
    everyone = follow(tree_broadcast, ranks, elements, "root")
    assert all(rank.buffer == [frozenset({0})] * elements for rank in everyone)
    if elements:
        assert sum(rank.messages for rank in everyone) == ranks - 1
        assert max(rank.rounds for rank in everyone) == math.ceil(math.log2(ranks))


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8])
def test_a_ring_sends_the_least_that_can_be_sent_in_the_most_steps(ranks: int) -> None:
    elements = 840
    for rank in follow(ring_all_reduce, ranks, elements):
        assert rank.sent_elements == 2 * (ranks - 1) * elements // ranks
        assert rank.rounds == 2 * (ranks - 1)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_halving_and_doubling_sends_as_little_in_as_few_steps_as_doublings(ranks: int) -> None:
    elements = 840 * 16
    for rank in follow(halving_doubling_all_reduce, ranks, elements):
        assert rank.sent_elements == 2 * (ranks - 1) * elements // ranks
        assert rank.rounds == 2 * int(math.log2(ranks))


def test_halving_and_doubling_of_other_numbers_of_ranks_costs_the_whole_buffer_twice() -> None:
    first, second, third = follow(halving_doubling_all_reduce, 3, 840)
    assert (first.sent_elements, first.rounds) == (840, 2), "it gives its buffer away, and gets the result"
    assert (second.sent_elements, second.rounds) == (840 + 840, 4)
    assert (third.sent_elements, third.rounds) == (840, 2)


def test_the_largest_messages_of_halving_and_doubling_go_to_the_nearest_ranks() -> None:
    sent = [one.send for one in halving_doubling_all_reduce(0, 8, 800)]
    assert [(part.peer, len(part)) for part in sent if part is not None] == [
        (1, 400),
        (2, 200),
        (4, 100),
        (4, 100),
        (2, 200),
        (1, 400),
    ]


def test_a_tree_has_fewest_messages_and_steps() -> None:
    for ranks in (2, 3, 4, 6, 8):
        everyone = follow(tree_all_reduce, ranks, 10)
        assert sum(rank.messages for rank in everyone) == 2 * (ranks - 1)
        assert max(rank.rounds for rank in everyone) == 2 * math.ceil(math.log2(ranks))


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(0, 1000))
def test_chunks_are_as_even_as_can_be_and_cover_everything(ranks: int, elements: int) -> None:
    cut = [compute_chunk_bounds(number, ranks, elements) for number in range(ranks)]
    assert [first for first, _ in cut] == [0, *(last for _, last in cut[:-1])]
    assert cut[-1][1] == elements
    sizes = [last - first for first, last in cut]
    assert max(sizes) - min(sizes) <= 1
