"""Useful share of a run's time under one plan: the job's intervals, the nodes' failures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from benchmarks.recovery.goodput import daly_interval
from hypothesis import given
from hypothesis import strategies as st

from support.problems import SMALL, job
from support.problems import problem as plain_problem
from wanma.job.forecast.forecast import StepTime
from wanma.job.plan.plan import Plan
from wanma.planner.forecast.failure_model import (
    LLAMA3_FAILURE_RATES,
    SECONDS_PER_DAY,
    CheckpointTier,
    CheckpointTiers,
    expected_goodput,
)
from wanma.planner.forecast.goodput import (
    DISK_RESTART_SECONDS,
    MEMORY_RESTART_SECONDS,
    PARTNER_RESTART_SECONDS,
    checkpoint_tiers,
    failure_rates_of,
    forecast_goodput,
    nodes_used,
)
from wanma.planner.forecast.plan_forecast import forecast_plan
from wanma.planner.forecast.problem import PlanningProblem
from wanma.planner.forecast.run_cost import run_cost, run_seconds
from wanma.planner.memory.in_memory_checkpoints import interval_steps

GPUS = 16_384
PLAN = Plan(dp_replicate=GPUS // 8, tp=8, sequence_parallel=True, precision="bf16", device="cuda")
STEP = StepTime(6.0, compute=5.0, optimizer=1.0)
IMAGE = 3 * 4 * plain_problem().workload.parameters / 8
"""State of a rank: weights and AdamW's two moments in fp32; a node's eight ranks hold one copy."""


def problem(nodes: int = GPUS // 8, days: float | None = None, **checkpoint: Any) -> PlanningProblem:
    plain = job(global_batch=GPUS, steps=100_000)
    of = plain.model_copy(
        update={
            "checkpoint": plain.checkpoint.model_copy(update=checkpoint),
            "cluster": plain.cluster.model_copy(update={"nodes": nodes}),
        }
    )
    found = plain_problem(of, SMALL, 8 * nodes)
    (node,) = found.cluster.nodes
    return replace(found, cluster=replace(found.cluster, nodes=(replace(node, days_between_failures=days),)))


def test_llama_3_s_machines_fail_every_three_hours_and_a_failure_costs_what_the_closed_form_says() -> None:
    given = problem(in_memory_every_steps=10, every_steps=100)
    found = forecast_goodput(given, PLAN, STEP)
    assert found.seconds_between_failures == pytest.approx(54 * SECONDS_PER_DAY / 419)
    recovery, intervals = checkpoint_tiers(given, PLAN, STEP)
    assert intervals == (60.0, 60.0, 600.0)
    assert found.share == expected_goodput(LLAMA3_FAILURE_RATES, recovery, intervals, GPUS)
    assert found.copying_share == 0.0  # hidden behind the next step
    # Ten seconds for 63 of 419, thirty for 315, two minutes and half of 600 s again for the rest; with those
    # of memory, half of 60 s of work again.
    one_by_one = (63 * (10 + 30) + 315 * (30 + 30) + 41 * (120 + 300)) / 419
    assert found.seconds_per_failure == pytest.approx(one_by_one, rel=0.05)
    assert found.failure_share == pytest.approx(one_by_one / (54 * SECONDS_PER_DAY / 419), rel=0.05)


def test_the_places_are_those_that_the_job_keeps() -> None:
    host = problem().hardware.host
    copied = IMAGE / host.link_bytes_per_second
    sent = IMAGE / problem().hardware.links[-1].bandwidth_bytes_per_second
    recovery, intervals = checkpoint_tiers(problem(in_memory_every_steps=1, every_steps=100), PLAN, STEP)
    assert recovery.memory == CheckpointTier(0.0, MEMORY_RESTART_SECONDS + copied, copied)
    assert recovery.partner == CheckpointTier(0.0, PARTNER_RESTART_SECONDS + sent + copied, copied + sent)
    assert recovery.disk.restore_seconds == DISK_RESTART_SECONDS + recovery.disk.completion_seconds
    assert intervals == (6.0, 6.0, 600.0)
    alone, intervals = checkpoint_tiers(problem(in_memory_every_steps=1, partner=False), PLAN, STEP)
    assert (alone.partner, len(intervals)) == (None, 2)
    nothing, intervals = checkpoint_tiers(problem(in_memory_every_steps="off", every_steps=0), PLAN, STEP)
    assert (nothing.memory, intervals) == (None, (600_000.0,))  # saved at the end alone


def test_processors_wait_for_their_copies_which_are_as_frequent_as_they_may_cost() -> None:
    plan = replace(PLAN, device="cpu")
    quick = StepTime(0.001, compute=0.001)
    stall = IMAGE / 6.5e9
    recovery, intervals = checkpoint_tiers(problem(every_steps=10_000), plan, quick)
    assert recovery.memory.stall_seconds == pytest.approx(stall)
    assert intervals[0] == pytest.approx(interval_steps(stall, 0.001) * 0.001)
    found = forecast_goodput(problem(every_steps=10_000), plan, quick)
    assert found.copying_share == pytest.approx(stall / intervals[0], rel=0.02)
    assert 0.009 < found.copying_share <= 0.01


def test_copies_in_memory_that_are_no_more_frequent_than_those_on_disk_cost_and_restore_nothing() -> None:
    plan = replace(PLAN, device="cpu")
    recovery, intervals = checkpoint_tiers(problem(in_memory_every_steps=200, every_steps=100), plan, STEP)
    assert recovery == CheckpointTiers(
        CheckpointTier(IMAGE / 6.5e9 / 2, recovery.disk.restore_seconds, recovery.disk.completion_seconds)
    )
    assert intervals == (600.0,)


def test_a_cluster_file_s_own_figure_counts_for_a_machine_with_all_its_devices() -> None:
    given = problem(days=100.0, in_memory_every_steps="off")
    (node,) = given.cluster.nodes
    assert failure_rates_of(node).mean_seconds_between(8) == pytest.approx(100 * SECONDS_PER_DAY)
    assert forecast_goodput(given, PLAN, STEP).seconds_between_failures == pytest.approx(
        100 * SECONDS_PER_DAY / 2048
    )
    bare = replace(node, devices=())
    assert failure_rates_of(bare).mean_seconds_between(1) == pytest.approx(100 * SECONDS_PER_DAY)
    assert failure_rates_of(replace(bare, days_between_failures=None)) is LLAMA3_FAILURE_RATES


def test_a_part_of_a_machine_counts_whole_and_its_idle_devices_fail_for_nobody() -> None:
    small = Plan(dp_replicate=12, precision="bf16", device="cuda")
    assert nodes_used(problem(nodes=4), small) == 2
    found = forecast_goodput(problem(nodes=4), small, STEP)
    assert found.seconds_between_failures == pytest.approx(LLAMA3_FAILURE_RATES.mean_seconds_between(12))


def test_days_energy_and_price_of_the_run_hold_with_its_failures() -> None:
    given = problem(days=40.0, in_memory_every_steps=10, every_steps=100)
    (node,) = given.cluster.nodes
    devices = tuple(replace(one, power_watts=700.0) for one in node.devices)
    priced = replace(node, devices=devices, power_watts=10_000.0, price_per_hour=30.0)
    given = replace(given, cluster=replace(given.cluster, nodes=(priced,)))
    found = run_cost(given, PLAN, STEP)
    never = replace(priced, days_between_failures=1e6)
    calm = run_cost(replace(given, cluster=replace(given.cluster, nodes=(never,))), PLAN, STEP)
    assert 0.9 < found.useful.share < 0.95
    work = run_seconds(given.job.train, given.global_batch, PLAN, STEP)
    assert found.seconds == pytest.approx(work / found.useful.share, rel=1e-4)
    assert found.price == pytest.approx(2048 * 30 * found.seconds / 3600)
    assert found.energy_joules / calm.energy_joules == pytest.approx(found.seconds / calm.seconds)


def test_a_run_that_would_never_end_is_told_and_not_forecast() -> None:
    given = problem(days=2.0, in_memory_every_steps="off", every_steps=0)
    found = forecast_plan(given, PLAN)
    assert found.step is not None
    assert found.run is None
    assert any(
        reason.startswith(
            "no forecast of the complete run: with a failure every 1 min 24 s, goodput is below 1%"
        )
        and "checkpoint.every_steps" in reason
        for reason in found.reasons
    )


@given(every=st.integers(1, 10_000), snapshots=st.one_of(st.just("off"), st.integers(1, 1000)))
def test_no_more_than_all_is_useful_and_daly_s_interval_is_about_the_best(
    every: int, snapshots: int | str
) -> None:
    given = problem(in_memory_every_steps=snapshots, every_steps=every)
    found = forecast_goodput(given, PLAN, STEP)
    assert 0 < found.share <= 1 - found.copying_share
    assert found.seconds_per_failure > 0
    if snapshots == "off":
        best = max(round(daly_interval(0.05, found.seconds_between_failures) / STEP.seconds), 1)
        at_best = forecast_goodput(problem(in_memory_every_steps="off", every_steps=best), PLAN, STEP)
        assert found.share <= at_best.share + 0.005
