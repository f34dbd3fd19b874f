"""Memory of in-memory checkpoints, and jobs that insist on more than there is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.problems import SMALL, job, problem
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.models.workload.model_workload import compute_decoder_workload
from wanma.planner.forecast.plan_forecast import forecast_plan
from wanma.planner.forecast.problem import host_memory_overflow_reason
from wanma.planner.memory.in_memory_checkpoints import in_memory_checkpoint_bytes

WORKLOAD = compute_decoder_workload(SMALL, 512)
STATE = 3 * 4 * WORKLOAD.parameters
"""Weights and AdamW's two moments, in fp32."""


def with_snapshots(wanted: Any, nodes: int = 1, partner: Any = "auto") -> Job:
    plain = job()
    return plain.model_copy(
        update={
            "checkpoint": plain.checkpoint.model_copy(
                update={"in_memory_every_steps": wanted, "partner": partner}
            ),
            "cluster": plain.cluster.model_copy(update={"nodes": nodes}),
        }
    )


@pytest.mark.parametrize(
    ("plan", "nodes", "share"),
    [
        (Plan(), 1, 1),
        (Plan(dp_replicate=4), 1, 4),
        (Plan(dp_shard=4, shard="parameters"), 1, 4),
        (Plan(dp_shard=4, shard="none"), 1, 4),
        (Plan(dp_replicate=4), 2, 2),  # each machine has all of it
        (Plan(dp_replicate=2, dp_shard=2, shard="parameters"), 2, 2),
        (Plan(dp_shard=4, shard="parameters"), 2, 4),
        (Plan(pp=2, dp_replicate=2), 2, 2),
    ],
    ids=str,
)
def test_ranks_of_a_machine_share_two_copies_of_what_they_hold(plan: Plan, nodes: int, share: int) -> None:
    assert (
        in_memory_checkpoint_bytes(with_snapshots("auto", nodes, False), WORKLOAD, plan) == 2 * STATE // share
    )
    guests = 2 if nodes > 1 else 1
    for partner in ("auto", True):
        with_partner = with_snapshots("auto", nodes, partner)
        assert in_memory_checkpoint_bytes(with_partner, WORKLOAD, plan) == guests * 2 * STATE // share


@pytest.mark.parametrize(
    ("plan", "nodes", "copies"),
    [
        (Plan(dp_shard=4, shard="optimizer"), 1, 1),  # ranks of a machine write them once
        (Plan(dp_shard=4, shard="optimizer"), 2, 2),  # each machine has all of them
        (Plan(dp_shard=4, shard="optimizer"), 4, 4),
        (Plan(dp_replicate=4), 4, 4),
        (Plan(dp_shard=4, shard="parameters"), 4, 1),  # gathered for each block, and so in shards
        (Plan(pp=2, dp_shard=2, shard="optimizer"), 4, 2),
    ],
    ids=str,
)
def test_frozen_weights_that_every_rank_has_whole_are_copied_on_each_machine(
    plan: Plan, nodes: int, copies: int
) -> None:
    frozen = replace(
        WORKLOAD, layers=tuple(replace(layer, trainable_parameters=0) for layer in WORKLOAD.layers)
    )
    plan = plan.with_changes(precision="bf16", device="cuda")
    found = in_memory_checkpoint_bytes(with_snapshots("auto", nodes, False), frozen, plan)
    assert found * plan.world_size == pytest.approx(2 * copies * 2 * WORKLOAD.parameters, rel=1e-6)


def test_averaged_weights_and_wider_ones_count() -> None:
    assert in_memory_checkpoint_bytes(job(weight_average=0.9), WORKLOAD, Plan()) == 2 * STATE * 4 // 3
    assert in_memory_checkpoint_bytes(job(), WORKLOAD, Plan(precision="fp64")) == 4 * STATE


def test_nothing_is_taken_where_there_are_none() -> None:
    assert in_memory_checkpoint_bytes(with_snapshots("off"), WORKLOAD, Plan()) == 0
    assert in_memory_checkpoint_bytes(job(), WORKLOAD, Plan(offload_optimizer="disk")) == 0
    never_again = job().model_copy(update={"cluster": job().cluster.model_copy(update={"max_restarts": 0})})
    assert in_memory_checkpoint_bytes(never_again, WORKLOAD, Plan()) == 0


def test_a_forecast_tells_them_beside_the_device_s_memory() -> None:
    plan = Plan(dp_replicate=8, precision="bf16", device="cuda")
    with_them, without = (forecast_plan(problem(with_snapshots(one)), plan) for one in ("auto", "off"))
    assert with_them.snapshots_bytes == 2 * STATE // 8
    assert replace(with_them, snapshots_bytes=0, run=None) == replace(without, run=None)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_only_a_job_that_insists_on_them_is_refused_where_they_do_not_fit(device: Any) -> None:
    plan = Plan(dp_replicate=8, precision="bf16", device=device)
    for wanted, fits in (("auto", True), (10, False)):
        one = problem(with_snapshots(wanted))
        needed = forecast_plan(one, plan)
        (node,) = one.cluster.nodes
        memory = needed.memory_bytes * 8 * (device == "cpu") + 2 * STATE
        small = replace(one.cluster, nodes=(replace(node, memory_bytes=int(memory)),))
        why = host_memory_overflow_reason(replace(one, cluster=small), plan, needed)
        assert (why is None) == fits
        assert fits or "for in-memory checkpoints)" in str(why)
        enough = replace(one.cluster, nodes=(replace(node, memory_bytes=int(1.2 * memory)),))
        assert host_memory_overflow_reason(replace(one, cluster=enough), plan, needed) is None
