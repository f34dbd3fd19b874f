"""Time of a reduction of compressed gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from wanma.collectives.compression.compression_traits import MAX_SLICE_ELEMENTS
from wanma.hardware.cluster_file.shorthand import parse_shorthand
from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Compression
from wanma.planner.cost.compression_cost import COMPRESSION_COSTS
from wanma.planner.cost.gradient_collectives import (
    GradientCollectives,
    error_feedback_bytes,
    reduction_sent_bytes,
)
from wanma.planner.hardware_model.builder import build_hardware_model
from wanma.planner.hardware_model.collective_time import RankGroup, all_gather_seconds, all_reduce_seconds
from wanma.planner.hardware_model.operator_time import memory_bound_seconds

NODES = build_hardware_model(parse_shorthand("16x8 A100, 1x10G"))
ONE_EACH = RankGroup(16, 8)
"""One rank of each node."""
ALL = RankGroup(128, 1)
ELEMENTS = 1e10
"""So that latencies hardly count."""


def summing(kind: Compression, whole_bytes: float = 4.0, **fields: Any) -> GradientCollectives:
    """By default of FSDP2's units, which are summed one after the other."""
    return GradientCollectives(
        replace(Plan(), compression=kind, **{"device": "cuda", **fields}), NODES, whole_bytes
    )


def moving(kind: Compression, elements: float = ELEMENTS) -> float:
    cost = COMPRESSION_COSTS[kind]
    return memory_bound_seconds(NODES.chip, elements * cost.traffic_bytes, cost.kernels)


@pytest.mark.parametrize(("kind", "share"), [("bf16", 2 / 4), ("fp16", 2 / 4), ("int8", 1 / 4)])
def test_replicas_of_a_hybrid_take_their_links_for_less_time(kind: Compression, share: float) -> None:
    whole = summing("none").all_reduce(ONE_EACH, ELEMENTS)
    smaller = summing(kind).all_reduce(ONE_EACH, ELEMENTS) - moving(kind)
    assert smaller == pytest.approx(share * whole, rel=0.1)


def test_of_replicas_on_cpus_one_part_is_made_smaller_while_another_travels() -> None:
    cost, parts, part = COMPRESSION_COSTS["int8"], 100, float(MAX_SLICE_ELEMENTS)
    one, nothing = (summing("int8").all_reduce(ONE_EACH, size) - moving("int8", size) for size in (part, 1.0))
    computing = memory_bound_seconds(NODES.chip, part * cost.cpu_traffic_bytes, cost.kernels)
    assert computing < moving("int8", part), "on processors its codec is compiled"
    bandwidth, latency = one - nothing, nothing
    travelling = parts * bandwidth + parts / 2 * latency
    expected = max(travelling, parts * computing) + min(travelling, parts * computing) / parts
    in_flight = summing("int8", device="cpu")
    assert in_flight.all_reduce(ONE_EACH, parts * part) == pytest.approx(expected)
    # A single part has nothing to hide behind, and within a machine all is moved by those that compute.
    assert in_flight.all_reduce(ONE_EACH, part) == pytest.approx(one + computing)
    inside = RankGroup(8)
    alone = summing("int8").all_reduce(inside, part) - moving("int8", part) + computing
    assert in_flight.all_reduce(inside, parts * part) == pytest.approx(parts * alone)


def test_small_buckets_are_many_parts() -> None:
    large = summing("int8", device="cpu").all_reduce(ONE_EACH, 1e7)
    small = summing("int8", device="cpu", bucket_bytes=1 << 20).all_reduce(ONE_EACH, 1e7)
    assert small > large


def test_an_exchange_of_all_with_all_does_not_gain_where_a_nodes_ranks_share_its_link() -> None:
    """An all-reduce sends each byte over it once for all of a node's ranks, an all-to-all once for each."""
    assert summing("int8").all_reduce(ALL, ELEMENTS) > summing("none").all_reduce(ALL, ELEMENTS)


def test_what_top_k_sends_grows_with_the_ranks() -> None:
    few, many = (
        summing("topk").all_reduce(RankGroup(size, 8), ELEMENTS) - moving("topk") for size in (2, 16)
    )
    expected = all_gather_seconds(NODES, ONE_EACH, 16 * ELEMENTS * 0.01 * 8)
    assert many == pytest.approx(expected)
    assert many > 10 * few


def test_thin_matrices_take_their_rank() -> None:
    thin, thick = (
        summing("powersgd", compression_rank=rank).all_reduce(ONE_EACH, ELEMENTS) - moving("powersgd")
        for rank in (2, 8)
    )
    assert 3 * thin < thick <= 4 * thin  # few bytes wait for their first one, too
    assert thick < 0.03 * summing("none").all_reduce(ONE_EACH, ELEMENTS)


@pytest.mark.parametrize("kind", ["none", "bf16", "fp16", "int8", "topk", "powersgd"])
def test_nobody_makes_smaller_what_is_not_exchanged(kind: Compression) -> None:
    assert summing(kind).all_reduce(RankGroup(1), ELEMENTS) == 0.0
    assert summing(kind).reduce_scatter(RankGroup(1), ELEMENTS, compressed=True) == 0.0


def test_gradients_that_are_small_already_stay_as_they_are() -> None:
    one = summing("bf16", whole_bytes=2.0)
    assert one.all_reduce(ONE_EACH, ELEMENTS) == all_reduce_seconds(NODES, ONE_EACH, 2 * ELEMENTS)


def test_shards_that_replicas_repeat_are_summed_whole_within_a_replica() -> None:
    within = RankGroup(8)
    plain = summing("none").reduce_scatter(within, ELEMENTS, compressed=True)
    assert summing("int8").reduce_scatter(within, ELEMENTS, compressed=False) == plain


@pytest.mark.parametrize(
    ("plan", "elements"),
    [
        (Plan(dp_replicate=4), 800),
        (Plan(dp_shard=4, shard="parameters"), 800),
        (Plan(dp_replicate=2, dp_shard=4, shard="gradients"), 200),
        (Plan(), 0),
    ],
    ids=str,
)
def test_what_is_left_out_is_kept_of_what_a_rank_hands_over(plan: Plan, elements: int) -> None:
    shards = 800 / plan.shard_group_size
    assert error_feedback_bytes(replace(plan, compression="int8"), 800, shards) == 4 * elements
    assert error_feedback_bytes(replace(plan, compression="bf16"), 800, shards) == 0


@pytest.mark.parametrize(
    ("plan", "kind", "sent", "whole"),
    [
        (Plan(dp_replicate=4), "none", 6 * 1000, 6 * 1000),
        (Plan(dp_replicate=4, precision="fp64"), "none", 12 * 1000, 12 * 1000),
        (Plan(dp_replicate=4), "bf16", 3 * 1000, 6 * 1000),
        (Plan(dp_replicate=4), "topk", 3 * 8 * 10, 6 * 1000),
        (Plan(dp_shard=4, shard="parameters"), "bf16", 1.5 * 1000, 3 * 1000),
        (Plan(dp_shard=4, shard="parameters"), "topk", 3 * 8 * 2.5, 3 * 1000),
        (Plan(dp_replicate=4, dp_shard=2, shard="gradients"), "bf16", 3 * 500, 6 * 500),
        (Plan(dp_replicate=4), "powersgd", 6 * 1000 * 8 / 1024, 6 * 1000),
    ],
    ids=str,
)
def test_a_rank_sends_its_part_to_all_others(
    plan: Plan, kind: Compression, sent: float, whole: float
) -> None:
    assert reduction_sent_bytes(replace(plan, compression=kind), 1000) == pytest.approx((sent, whole))
