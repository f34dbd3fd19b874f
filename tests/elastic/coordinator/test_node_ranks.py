"""Assignment of node ranks: neighbours in the network adjacent, requested ranks first."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.coordinator import CAUSE, Table, join
from wanma.elastic.coordinator.member import Member
from wanma.elastic.coordinator.node_ranks import (
    assign_node_ranks,
    sort_by_preference,
    sort_by_topology,
    topology_sort_key,
)
from wanma.elastic.protocol.messages import FailureReport, JoinRequest, StartCommand, TerminationReport


def at(position: str, number: int | None = None) -> JoinRequest:
    return replace(join(number), topology_address=position)


def seated(joins: list[JoinRequest]) -> list[int]:
    peers = [Member(one) for one in joins]
    assign_node_ranks(peers, len(peers))
    return [peer.node_rank for peer in peers]


@pytest.mark.parametrize(
    ("positions", "numbers"),
    [
        (["rack-2/a", "rack-10/a", "rack-1/b", "rack-1/a"], [2, 3, 1, 0]),
        (["s1.s3.n10", "s0.s2.n1", "s1.s3.n9", "s0.s1.n1"], [3, 1, 2, 0]),
        (["1/0", "0/11", "0/2"], [2, 1, 0]),
        (["", "r2", "", "r1"], [2, 1, 3, 0]),
        (["", "", ""], [0, 1, 2]),
        (["r1", "r1", "r1"], [0, 1, 2]),
    ],
)
def test_near_machines_get_neighbouring_numbers_and_unknown_ones_come_last(
    positions: list[str], numbers: list[int]
) -> None:
    assert seated([at(position) for position in positions]) == numbers


def test_a_number_that_is_asked_for_counts_before_the_place() -> None:
    assert seated([at("r1"), at("r9", 0), at("r2")]) == [1, 0, 2]


@given(st.permutations([f"rack-{rack}/node-{node}" for rack in range(4) for node in range(3)]))
def test_racks_stay_together_in_whatever_order_their_machines_come(positions: list[str]) -> None:
    numbers = seated([at(position) for position in positions])
    racks = [position for _, position in sorted(zip(numbers, positions, strict=True))]
    assert racks == [f"rack-{rack}/node-{node}" for rack in range(4) for node in range(3)]


@given(st.lists(st.text(max_size=12), max_size=6))
def test_whatever_a_place_is_called_it_can_be_compared(positions: list[str]) -> None:
    assert len(sorted(positions, key=topology_sort_key)) == len(positions)


def test_ranks_follow_the_places() -> None:
    table = Table(3)
    table.hear(0, at("r2/a"))
    table.hear(1, at("r1/a"))
    said = table.hear(2, at("r2/b"))
    starts = {peer: word for peer, word in said if isinstance(word, StartCommand)}
    assert {peer: start.first_rank for peer, start in starts.items()} == {0: 2, 1: 0, 2: 4}


def test_a_machine_that_takes_anothers_place_takes_its_number_and_nobody_moves() -> None:
    table = Table(3, retries=3)
    for peer, position in enumerate(("r1/a", "r1/b", "r2/a")):
        table.hear(peer, at(position))
    table.hear(0, FailureReport(CAUSE))
    table.lose(1)
    for peer in (0, 2):
        table.hear(peer, TerminationReport(5000, 3, ()))
    said = table.hear(3, at("r9/z"))
    starts = {peer: word.node_rank for peer, word in said if isinstance(word, StartCommand)}
    assert starts == {0: 0, 3: 1, 2: 2}


def peers(*given: tuple[str, int]) -> dict[int, Member]:
    return {identity: Member(at(position), node) for identity, (position, node) in enumerate(given)}


def test_those_that_had_ranks_take_part_first_and_numbers_go_by_places() -> None:
    here = peers(("r2/a", 1), ("r1/b", -1), ("r1/a", -1), ("r1/c", 0))
    assert sort_by_preference(here, 4) == [3, 0, 2, 1]
    assert sort_by_topology([3, 0, 2], here) == [2, 3, 0], "by rack, whoever had which number"


def test_where_nobody_knows_the_places_the_order_stands() -> None:
    here = peers(("", 1), ("", -1), ("", 0))
    assert sort_by_topology(sort_by_preference(here, 4), here) == [2, 0, 1]
    wished = {0: Member(at("r2", 0)), 1: Member(at("r1", 1))}
    assert sort_by_topology(sort_by_preference(wished, 2), wished) == [0, 1], "numbers were asked for"
