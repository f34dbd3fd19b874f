"""Time of collectives: volumes, levels, contention."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.machines import CHIP, machine
from wanma.planner.hardware_model.collective_time import (
    RankGroup,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    deduplicated_dispatch_seconds,
    reduce_scatter_seconds,
    send_seconds,
)
from wanma.planner.hardware_model.model import HardwareModel, LinkLevel

GIGABYTE = 1e9
FREE = machine(latency=0.0)

groups = st.builds(RankGroup, st.sampled_from([1, 2, 4, 8, 16, 32]), st.just(1)) | st.builds(
    RankGroup, st.sampled_from([2, 4]), st.sampled_from([2, 4, 8])
)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_ring_moves_what_its_formula_says(size: int) -> None:
    one_pass = GIGABYTE * (size - 1) / size / 100e9
    assert all_gather_seconds(FREE, RankGroup(size), GIGABYTE) == pytest.approx(one_pass)
    assert reduce_scatter_seconds(FREE, RankGroup(size), GIGABYTE) == pytest.approx(one_pass)
    assert all_reduce_seconds(FREE, RankGroup(size), GIGABYTE, "ring") == pytest.approx(2 * one_pass)
    assert all_to_all_seconds(FREE, RankGroup(size), GIGABYTE) == pytest.approx(one_pass)


def test_members_of_a_node_carry_a_ring_over_all_their_links() -> None:
    whole = all_gather_seconds(FREE, RankGroup(16), GIGABYTE)
    assert whole == pytest.approx(GIGABYTE * 15 / 16 / 80e9)  # eight links of 10 GB/s are less than 100


def test_a_group_that_lies_across_an_edge_pays_for_the_link_there() -> None:
    """Groups of four on nodes of six: every second one has two members on each of two nodes."""
    sixes = HardwareModel(CHIP, (LinkLevel(6, 0.0, 100e9), LinkLevel(24, 0.0, 10e9)), start_seconds=0.0)
    assert RankGroup(4).members_within(sixes.links[0], 24) == 2
    assert RankGroup(3).members_within(sixes.links[0], 24) == 3
    assert RankGroup(6).members_within(sixes.links[0], 24) == 6
    assert RankGroup(12).members_within(sixes.links[0], 24) == 6
    assert RankGroup(2, stride=2).members_within(sixes.links[0], 24) == 1
    across = all_gather_seconds(sixes, RankGroup(4), GIGABYTE)
    between, inside = GIGABYTE / 4 / 10e9, GIGABYTE / 2 / 100e9
    assert across == pytest.approx(between + inside), "a half each over the edge, then the other half inside"
    assert all_gather_seconds(sixes, RankGroup(3), GIGABYTE) == pytest.approx(GIGABYTE * 2 / 3 / 100e9)


def parts(size: int, stride: int, unit: int, ranks: int) -> int:
    """The fewest members that any group of consecutive spans has in a unit, counted one by one."""
    found = []
    for first in range(0, ranks - size * stride + 1, size * stride):
        units = [(first + place * stride) // unit for place in range(size)]
        found.append(min(units.count(one) for one in set(units)))
    return min(found)


@pytest.mark.parametrize("unit", [6, 8, 64, 72])
@pytest.mark.parametrize("size", [2, 3, 8, 12, 32, 64, 72, 96])
@pytest.mark.parametrize("units", [1, 3, 8])
def test_the_smallest_part_of_a_group_is_counted_over_the_groups_that_there_are(
    unit: int, size: int, units: int
) -> None:
    if size <= unit * units:
        counted = parts(size, 1, unit, unit * units)
        assert RankGroup(size).members_within(LinkLevel(unit, 0.0, 1.0), unit * units) == counted
        assert RankGroup(size, 4).members_within(LinkLevel(4 * unit, 0.0, 1.0), 4 * unit * units) == counted


def test_a_strided_group_has_one_link_per_node() -> None:
    assert all_gather_seconds(FREE, RankGroup(2, stride=8), GIGABYTE) == pytest.approx(GIGABYTE / 2 / 10e9)


def test_a_hierarchical_all_reduce_sends_one_part_in_eight_between_nodes() -> None:
    inside = GIGABYTE * 7 / 8 / 100e9
    between = GIGABYTE / 8 * 3 / 4 / 10e9
    found = all_reduce_seconds(FREE, RankGroup(32), GIGABYTE, "hierarchical")
    assert found == pytest.approx(2 * (inside + between))


def test_a_tree_has_the_latency_of_its_depth() -> None:
    slow = machine(latency=1e-6)
    ring, tree = (all_reduce_seconds(slow, RankGroup(32), 8, algorithm) for algorithm in ("ring", "tree"))
    assert ring == pytest.approx(2 * (7 * 1e-6 + 3 * 5e-6), rel=1e-3)
    assert tree == pytest.approx(2 * (3 * 1e-6 + 2 * 5e-6), rel=1e-3)


def test_a_message_of_the_ramps_size_takes_twice_as_long() -> None:
    ramped = HardwareModel(CHIP, (LinkLevel(8, 0.0, 100e9, ramp_bytes=1e6),), start_seconds=3e-6)
    assert send_seconds(ramped, 1, 1e6) == pytest.approx(3e-6 + 2e6 / 100e9)


def test_a_token_is_routed_to_a_rank_only_once() -> None:
    inside = GIGABYTE * 8 * (1 - (7 / 8) ** 8) * 7 / 8 / 100e9
    assert deduplicated_dispatch_seconds(FREE, RankGroup(8), GIGABYTE, experts_per_token=8) == pytest.approx(
        inside
    )
    # Of 16 ranks in two nodes, the other node is reached by all but one in 2⁸ tokens.
    between = GIGABYTE * (1 - 0.5**8) / 10e9
    assert deduplicated_dispatch_seconds(FREE, RankGroup(16), GIGABYTE, experts_per_token=8) == pytest.approx(
        between
    )


def test_sending_goes_over_the_level_that_joins_both_ends() -> None:
    assert send_seconds(FREE, 7, GIGABYTE) == pytest.approx(GIGABYTE / 100e9)
    assert send_seconds(FREE, 8, GIGABYTE) == pytest.approx(GIGABYTE / 10e9)


@given(groups, st.floats(1.0, 1e10), st.floats(1.0, 10.0), st.booleans())
def test_a_faster_link_never_hurts(group: RankGroup, size: float, factor: float, inner: bool) -> None:
    slow = machine()
    fast = machine(inner=100e9 * factor) if inner else machine(outer=10e9 * factor)
    for collective in (all_reduce_seconds, all_gather_seconds, all_to_all_seconds):
        assert collective(fast, group, size) <= collective(slow, group, size) * (1 + 1e-12)


@given(groups, st.floats(1.0, 1e10), st.floats(1.0, 10.0))
def test_more_bytes_never_take_less_time(group: RankGroup, size: float, factor: float) -> None:
    for collective in (all_reduce_seconds, all_gather_seconds, all_to_all_seconds):
        assert collective(machine(), group, size * factor) >= collective(machine(), group, size) * (1 - 1e-12)


def test_a_group_larger_than_the_machine_is_refused() -> None:
    with pytest.raises(ValueError, match="spans 64 ranks, and there are 32"):
        all_reduce_seconds(machine(32), RankGroup(64), 1.0)


def test_levels_come_innermost_first() -> None:
    with pytest.raises(ValueError, match="innermost first"):
        HardwareModel(CHIP, (LinkLevel(8, 0, 1e9), LinkLevel(8, 0, 1e9)))
