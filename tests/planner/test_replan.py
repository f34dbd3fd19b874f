"""Change of a run's plan when nodes come or go: its gain, its cost, its reason."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wanma.hardware.cluster_file.shorthand import parse_shorthand
from wanma.job.cluster import Cluster, Device, NodeGroup
from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.workload.model_workload import compute_decoder_workload
from wanma.planner.forecast.plan_forecast import forecast_plan
from wanma.planner.forecast.problem import PlanningInputs, PlanningProblem, build_problem
from wanma.planner.job_planner import plan_for_job
from wanma.planner.replan import ReplanCost, ReplanResult, replan, replan_cost

MODEL = DecoderConfig(4, 2048, 16, 16, 8192, 32000)
WORKLOAD = compute_decoder_workload(MODEL, 1024)
FOUR, TWO = parse_shorthand("4x8 H100, 8x400G"), parse_shorthand("2x8 H100, 8x400G")
DATA_PARALLEL = {"pp": 1, "tp": 1, "cp": 1, "recompute": "none", "shard": "optimizer"}
FULL = Plan(dp_shard=32, shard="optimizer", micro_batch=4, precision="bf16", device="cuda")
TENSOR = replace(FULL, tp=2, dp_shard=8, sequence_parallel=True, micro_batch=8)


def job(parallel: dict[str, Any] | None = None, nodes: int = 4) -> Job:
    return Job.model_validate(
        {
            "model": {"family": "decoder"},
            "data": {"text": "stdlib", "sequence_length": 1024},
            "train": {"global_batch": 128, "precision": "bf16"},
            "parallel": parallel if parallel is not None else {"auto": True, **DATA_PARALLEL},
            "cluster": {"nodes": nodes, "rendezvous": "a:1"},
        }
    )


def mystery(count: int) -> Cluster:
    """Machines of devices that nobody knows the rates of."""
    device = Device("cuda", "Mystery", 80 << 30, {})
    return Cluster((NodeGroup("box", 64, 512 << 30, (device,) * 8, count=count),))


def posed(on: Cluster = FOUR, **parallel: Any) -> PlanningProblem:
    of = job({"auto": True, **DATA_PARALLEL, **parallel}, on.node_count)
    return build_problem(of, on, WORKLOAD, MODEL)


def test_on_fewer_devices_than_ranks_it_must_change() -> None:
    decision = replan(posed(), FULL, TWO, 1000)
    assert decision.is_change
    assert decision.plan.world_size == 16
    assert decision.net_gain_seconds == math.inf
    assert "32 ranks, and there is room for 16" in decision.reason
    best = plan_for_job(PlanningInputs(job(nodes=2), TWO, WORKLOAD, MODEL))
    assert decision.plan == best.plan
    assert decision.forecast.step == (best.forecast.step if best.forecast else None)


def test_on_the_machines_that_it_has_the_best_plan_stays() -> None:
    best = plan_for_job(PlanningInputs(job(), FOUR, WORKLOAD, MODEL)).plan
    decision = replan(posed(), best, FOUR, 1_000_000)
    assert not decision.is_change
    assert decision.plan == best
    assert decision.cost is None
    assert decision.reason.startswith("keep the plan: no plan is faster")


def test_more_machines_are_taken_where_what_is_left_gains_twice_what_it_costs() -> None:
    running = plan_for_job(PlanningInputs(job(nodes=2), TWO, WORKLOAD, MODEL)).plan
    many, few = (replan(posed(TWO), running, FOUR, steps) for steps in (100_000, 10))
    assert many.is_change
    assert many.plan.world_size == 32
    assert not few.is_change
    assert few.plan == running
    now = build_problem(job(), FOUR, WORKLOAD, MODEL)
    old, new = forecast_plan(now, running).step, many.forecast.step
    saved = 100_000 * (old.seconds - new.seconds)
    assert many.net_gain_seconds == pytest.approx(saved - many.cost.seconds)
    assert "100,000 steps save " in many.reason
    assert "10 steps save " in few.reason


def test_what_is_lost_and_what_a_restart_takes_counts() -> None:
    running = plan_for_job(PlanningInputs(job(nodes=2), TWO, WORKLOAD, MODEL)).plan
    steps = 100_000
    plain = replan(posed(TWO), running, FOUR, steps)
    assert plain.is_change
    assert not replan(posed(TWO), running, FOUR, steps, restart_seconds=1e6).is_change
    assert not replan(posed(TWO), running, FOUR, steps, lost_work_seconds=1e6).is_change
    assert not replan(posed(TWO), running, FOUR, steps, state_bytes_per_second=1.0).is_change


def test_the_cost_is_every_copy_of_the_state_over_the_machines_and_a_restart() -> None:
    plan = Plan(dp_replicate=2, dp_shard=16, shard="parameters", precision="bf16", device="cuda")
    cost = replan_cost(
        posed(), plan, 4, restart_seconds=3.0, lost_work_seconds=5.0, state_bytes_per_second=1e9
    )
    state = 2 * 4 * 3 * WORKLOAD.parameters  # of AdamW: a weight and two moments in fp32, and two replicas
    assert cost == ReplanCost(state, state / 4e9, 3.0, 5.0)
    assert cost.seconds == pytest.approx(state / 4e9 + 8.0)


def test_a_job_that_fixes_its_layout_keeps_all_but_its_data_axes() -> None:
    fixed = job({"tp": 2, "dp_shard": 16, "shard": "optimizer", "micro_batch": 8})
    running = replace(TENSOR, dp_shard=16)
    decision = replan(build_problem(fixed, FOUR, WORKLOAD, MODEL), running, TWO, 1000)
    plan = decision.plan
    assert decision.is_change
    assert (plan.world_size, plan.tp, plan.pp, plan.cp, plan.shard) == (16, 2, 1, 1, "optimizer")
    assert plan.dp_replicate * plan.dp_shard == 8


def test_what_fits_nowhere_on_what_is_left_is_refused() -> None:
    large = DecoderConfig(8, 8192, 64, 8, 28672, 32000)
    of = job({"auto": True, "pp": 1, "tp": 1, "cp": 1})
    problem = build_problem(of, FOUR, compute_decoder_workload(large, 1024), large)
    with pytest.raises(JobError, match="does not fit on 1 node of 1 × H100"):
        replan(problem, FULL, parse_shorthand("1x1 H100"), 100)


def test_without_rates_it_stays_where_it_can_and_changes_where_it_must() -> None:
    problem = build_problem(job(), mystery(4), WORKLOAD, MODEL)
    assert replan(problem, FULL, mystery(5), 10**6).reason.startswith("keep the plan: no step-time forecast")
    fewer = replan(problem, FULL, mystery(2), 10)
    assert fewer.is_change
    assert fewer.plan.world_size == 16


def test_forecasts_are_set_right_by_what_was_measured() -> None:
    running = plan_for_job(PlanningInputs(job(nodes=2), TWO, WORKLOAD, MODEL)).plan
    forecasted = replan(posed(TWO), running, FOUR, 100_000)
    measured = replan(posed(TWO), running, FOUR, 100_000, step_seconds=10.0)
    now = build_problem(job(), FOUR, WORKLOAD, MODEL)
    old, new = forecast_plan(now, running).step, measured.forecast.step
    assert measured.plan == forecasted.plan
    saved = 100_000 * 10.0 * (1 - new.seconds / old.seconds)
    assert measured.net_gain_seconds == pytest.approx(saved - measured.cost.seconds)


def test_without_rates_but_with_a_measured_step_more_devices_are_taken_for_what_they_may_gain_at_best() -> (
    None
):
    """A job that says its sizes, on devices that nobody knows."""

    fixed = job({"tp": 2, "dp_shard": 8, "shard": "optimizer"}, nodes=2)
    problem = build_problem(fixed, mystery(2), WORKLOAD, MODEL)
    decision = replan(problem, TENSOR, mystery(3), 1000, step_seconds=6.0)
    assert decision.is_change
    assert (decision.plan.tp, decision.plan.dp_shard, decision.plan.dp_replicate) == (2, 12, 1)
    assert "4.00 s at best" in decision.reason
    assert not replan(problem, TENSOR, mystery(3), 5, step_seconds=6.0).is_change


def test_no_step_left_is_no_question() -> None:
    with pytest.raises(ValueError, match="steps_left = 0"):
        replan(posed(), FULL, FOUR, 0)


@settings(max_examples=12, deadline=None)
@given(steps=st.integers(1, 10**6), restart=st.floats(0, 1e4))
def test_it_never_changes_for_less_than_twice_the_cost(steps: int, restart: float) -> None:
    slow = replace(FULL, dp_shard=16, micro_batch=8)
    decision: ReplanResult = replan(posed(), slow, FOUR, steps, restart_seconds=restart)
    if decision.is_change:
        assert decision.net_gain_seconds >= decision.cost.seconds
    else:
        assert decision.plan == slow
