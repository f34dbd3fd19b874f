"""Partner nodes that keep in-memory checkpoints, and that send them back after a loss."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanma.checkpoint.in_memory.partner_ring import (
    RestoreTransfer,
    backed_up_ranks,
    backup_rank_of,
    node_of,
    node_rank_ranges,
    plan_restore,
)

sizes = st.lists(st.integers(1, 5), min_size=2, max_size=6)


def test_each_node_keeps_the_images_of_the_node_before_rank_by_rank() -> None:
    assert [backup_rank_of(rank, [2, 2, 2]) for rank in range(6)] == [2, 3, 4, 5, 0, 1]
    assert [backed_up_ranks(rank, [2, 2, 2]) for rank in range(6)] == [(4,), (5,), (0,), (1,), (2,), (3,)]


def test_a_node_with_fewer_ranks_takes_several_with_one() -> None:
    assert [backup_rank_of(rank, [3, 1]) for rank in range(4)] == [3, 3, 3, 0]
    assert [backed_up_ranks(rank, [3, 1]) for rank in range(4)] == [(3,), (), (), (0, 1, 2)]


def test_a_single_node_has_no_partner() -> None:
    assert backed_up_ranks(0, [4]) == backed_up_ranks(0, []) == ()
    with pytest.raises(ValueError, match="one node has no partner"):
        backup_rank_of(0, [4])


@given(sizes)
def test_every_rank_has_one_host_on_another_node_that_knows_of_it(ranks_by_node: list[int]) -> None:
    ranks = range(sum(ranks_by_node))
    taken = Counter(guest for rank in ranks for guest in backed_up_ranks(rank, ranks_by_node))
    assert taken == dict.fromkeys(ranks, 1)
    for rank in ranks:
        host = backup_rank_of(rank, ranks_by_node)
        assert rank in backed_up_ranks(host, ranks_by_node)
        assert node_of(host, ranks_by_node) == (node_of(rank, ranks_by_node) + 1) % len(ranks_by_node)


@given(sizes, st.data())
def test_the_loss_of_any_node_is_made_good_by_its_partner(
    ranks_by_node: list[int], data: st.DataObject
) -> None:
    gone = data.draw(st.integers(0, len(ranks_by_node) - 1))
    spans = node_rank_ranges(ranks_by_node)
    held = {
        node: {*span, *spans[node - 1]} if node != gone else set[int]() for node, span in enumerate(spans)
    }
    fetches, lost = plan_restore(held, ranks_by_node)
    assert lost == []
    assert fetches == [RestoreTransfer(owner, backup_rank_of(owner, ranks_by_node)) for owner in spans[gone]]


def test_nothing_is_fetched_that_is_there() -> None:
    assert plan_restore({0: {0, 1}, 1: {2}}, [2, 1]) == ([], [])


def test_a_node_lost_with_its_partner_is_lost() -> None:
    held = {0: {0, 1, 4, 5}, 1: set[int](), 2: set[int]()}
    assert plan_restore(held, [2, 2, 2]) == ([RestoreTransfer(4, 0), RestoreTransfer(5, 1)], [2, 3])


@given(sizes, st.data())
def test_whatever_is_somewhere_is_fetched_by_its_owner_from_there(
    ranks_by_node: list[int], data: st.DataObject
) -> None:
    spans, ranks = node_rank_ranges(ranks_by_node), range(sum(ranks_by_node))
    held = {node: data.draw(st.sets(st.sampled_from(ranks))) for node in range(len(spans))}
    fetches, lost = plan_restore(held, ranks_by_node)
    here = {rank for node, span in enumerate(spans) for rank in span if rank in held[node]}
    assert sorted([*here, *lost, *(fetch.owner for fetch in fetches)]) == list(ranks)
    assert all(fetch.owner in held[node_of(fetch.source, ranks_by_node)] for fetch in fetches)
    assert all(owner not in there for owner in lost for there in held.values())
