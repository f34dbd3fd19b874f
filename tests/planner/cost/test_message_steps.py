"""Forecast of all-reduces of messages: the steps, messages and links of the schedules that run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from support.machines import CHIP
from wanma.collectives.algorithms.communication_schedules import (
    CommunicationSchedule,
    halving_doubling_all_reduce,
    tree_all_reduce,
)
from wanma.hardware.cluster_file.reader import read_cluster
from wanma.job.plan.plan import Plan
from wanma.planner.cost.data_parallel import DataParallelCost, overlaps_gradient_reduction
from wanma.planner.cost.decoder_layers import FrameworkTraits
from wanma.planner.hardware_model.builder import build_hardware_model
from wanma.planner.hardware_model.collective_time import RankGroup, all_reduce_seconds
from wanma.planner.hardware_model.message_all_reduce_time import (
    MESSAGE_STEP_SECONDS,
    halving_doubling_steps,
    halving_messages,
    tree_messages,
    tree_steps,
)
from wanma.planner.hardware_model.model import HardwareModel, LinkLevel

IDLE = replace(CHIP, bandwidth_bytes_per_second=1e30, launch_seconds=0.0)


def messages_of(schedule: CommunicationSchedule, ranks: int, elements: int) -> Counter[tuple[int, int, int]]:
    """Return (sender, receiver, elements) of all messages that the ranks send."""
    return Counter(
        (rank, exchange.send.peer, len(exchange.send))
        for rank in range(ranks)
        for exchange in schedule(rank, ranks, elements)
        if exchange.send
    )


@pytest.mark.parametrize("ranks", range(1, 18))
def test_the_forecast_counts_the_messages_that_run(ranks: int) -> None:
    elements = 1 << 10
    up = [message for step in tree_messages(ranks) for message in step]
    down = [(receiver, sender) for sender, receiver in up]
    assert messages_of(tree_all_reduce, ranks, elements) == Counter(
        (*message, elements) for message in up + down
    )
    first, halvings = halving_messages(ranks)
    expected = Counter((*message, elements) for message in first)
    expected += Counter((receiver, sender, elements) for sender, receiver in first)
    for number, step in enumerate(halvings, 1):
        for message in step:
            expected[*message, elements >> number] += 2  # halved, and back
    assert messages_of(halving_doubling_all_reduce, ranks, elements) == expected


def test_steps_use_the_links_that_their_messages_cross() -> None:
    aligned = [step.messages_per_unit for step in tree_steps((4, 8))]
    assert aligned == [(1, 0), (1, 0), (0, 1)] * 2
    thirds = [step.messages_per_unit for step in tree_steps((3, 6))]
    assert thirds == [(1, 1), (1, 0), (0, 1)] * 2, "ranks 2 and 3 are neighbours on two nodes"
    before, *halvings = halving_doubling_steps((2, 6))[:3]
    assert (before.messages_per_unit, before.buffer_share, before.is_exchange) == ((1, 0), 1.0, False)
    assert [step.messages_per_unit for step in halvings] == [(1, 1), (0, 2)]
    assert [step.buffer_share for step in halvings] == [0.5, 0.25]


def test_a_step_between_nodes_has_the_latency_of_their_link_however_ranks_lie_on_nodes() -> None:
    latency = 1.0
    links = (LinkLevel(3, 0.0, 1e30), LinkLevel(6, latency, 1e30))
    hardware = HardwareModel(IDLE, links, start_seconds=0.0)
    tree = all_reduce_seconds(hardware, RankGroup(6), 1.0, "message_tree")
    assert tree == pytest.approx(2 * (2 * latency + 3 * MESSAGE_STEP_SECONDS))


def test_a_hierarchical_all_reduce_sends_each_owners_part_to_all_other_nodes() -> None:
    """Two racks of two nodes of two ranks: there is no level of racks in what runs."""
    rate, size = 1e6, 8e6
    links = (LinkLevel(2, 0.0, 1e30), LinkLevel(4, 0.0, 1e30), LinkLevel(8, 0.0, rate))
    hardware = HardwareModel(IDLE, links, start_seconds=0.0)
    found = all_reduce_seconds(hardware, RankGroup(8), size, "message_hierarchical")
    # An owner has half of the buffer; half of that belongs to nodes of the other rack; there and back.
    assert found == pytest.approx(2 * size / 2 / 2 / rate + 4 * MESSAGE_STEP_SECONDS)


def test_nodes_of_one_rank_reduce_over_the_network() -> None:
    """Gloo's ring between nodes, beside backward, as on nodes of several ranks."""
    cluster = read_cluster("4x 64 cores EPYC 7742, 1G")
    hardware = build_hardware_model(cluster, ranks=1)
    assert [link.devices for link in hardware.links] == [1, 4]
    plan = Plan(dp_replicate=4)
    assert overlaps_gradient_reduction(plan, hardware)
    reduce, _ = DataParallelCost(plan, hardware, FrameworkTraits()).reduce_gather_per_step(1e6)
    assert reduce == all_reduce_seconds(hardware, RankGroup(4), 4e6, "gloo_ring")
