"""Exchanges of data ranks, once a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wanma.hardware.cluster_file.shorthand import parse_shorthand
from wanma.job.plan.plan import Plan
from wanma.planner.cost.data_parallel import DataParallelCost
from wanma.planner.cost.decoder_layers import FrameworkTraits
from wanma.planner.hardware_model.builder import build_hardware_model

MACHINE = build_hardware_model(parse_shorthand("16x8 A100, 1x10G"))
REPLICAS = Plan(dp_replicate=128, precision="bf16", device="cuda")


def test_a_hybrid_compresses_what_its_replicas_sum_and_not_what_its_shards_do() -> None:
    hybrid = Plan(dp_replicate=16, dp_shard=8, shard="optimizer", precision="bf16", device="cuda")
    replicas, shards = (
        DataParallelCost(plan, MACHINE, FrameworkTraits())
        for plan in (hybrid, replace(hybrid, compression="int8"))
    )
    within = replicas.gradient_collectives.reduce_scatter(replicas.shards, 1e10, compressed=True)
    assert shards.reduce_gather_per_step(1e10)[0] == pytest.approx(
        within + shards.gradient_collectives.all_reduce(shards.replicas, 1e10 / 8)
    )
    assert shards.reduce_gather_per_step(1e10)[0] < 0.5 * replicas.reduce_gather_per_step(1e10)[0]


def test_blocks_whose_gradients_are_scattered_are_compressed_one_by_one() -> None:
    sharded = Plan(dp_shard=128, shard="parameters", precision="bf16", device="cuda")
    plain, thin = (
        DataParallelCost(replace(sharded, compression=kind), MACHINE, FrameworkTraits())
        for kind in ("none", "powersgd")
    )
    assert thin.exposed_per_micro_batch(1e9, 0.0, 0.0)[1] < plain.exposed_per_micro_batch(1e9, 0.0, 0.0)[1]


def test_nobody_rounds_what_is_not_exchanged() -> None:
    alone = DataParallelCost(
        Plan(compression="int8", precision="bf16", device="cuda"), MACHINE, FrameworkTraits()
    )
    assert alone.reduce_gather_per_step(1e9)[0] == 0.0
