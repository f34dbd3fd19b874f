"""Reasons against a plan: the verdict, the seconds by kind and their causes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.problems import SMALL, job, problem
from wanma.job.cluster import Cluster, Device
from wanma.job.forecast.forecast import MEMORY_KINDS
from wanma.job.plan.plan import Plan
from wanma.observe.units import bytes_text
from wanma.planner.explain.comparison import MIN_NAMED_SHARE, compare_plans
from wanma.planner.forecast.plan_forecast import forecast_plan, forecast_plan_memory
from wanma.planner.forecast.problem import PlanningProblem
from wanma.planner.memory.peak import pipeline_rank_memory
from wanma.planner.search.result import Candidate

BEST = Plan(dp_replicate=16, precision="bf16", device="cuda")
WIDE = replace(BEST, dp_replicate=1, tp=16, sequence_parallel=True, micro_batch=64)
BIG = job(global_batch=64)


def candidate(given: PlanningProblem, plan: Plan) -> Candidate:
    return Candidate(plan, forecast_plan(given, plan))


def wide_problem(**links: float) -> PlanningProblem:
    return problem(BIG, replace(SMALL, heads=16, kv_heads=16), devices=16, **links)


def test_tensor_ranks_in_two_machines_are_named_with_the_communication_they_cost() -> None:
    given = wide_problem(outer=1e9)
    told = compare_plans(given, WIDE, candidate(given, BEST))
    lost = told.differences[0]
    assert told.verdict == "slower"
    assert lost.kind == "tensor"
    assert lost.cause == "TP 16 crosses nodes"
    assert str(lost) in told.sentence
    assert "exposed all-gather and reduce-scatter" in told.sentence
    assert lost.seconds == pytest.approx(told.forecast.step.tensor)


def test_tensor_ranks_in_one_machine_cross_nothing() -> None:
    given = wide_problem()
    told = compare_plans(
        given, replace(WIDE, tp=8, dp_replicate=2, sequence_parallel=False), candidate(given, BEST)
    )
    (tensor,) = [one for one in told.differences if one.kind == "tensor"]
    assert tensor.cause == "TP 8"
    assert tensor.description == "exposed all-reduce"


def test_recompute_is_the_cause_of_longer_computing() -> None:
    given = problem(BIG)
    best = replace(BEST, dp_replicate=8)
    told = compare_plans(given, replace(best, recompute="full", recompute_share=0.5), candidate(given, best))
    assert told.verdict == "slower"
    assert told.differences[0].kind == "compute"
    assert told.differences[0].cause == "recompute full of 50% instead of none"


def test_what_is_gained_is_what_the_best_pays() -> None:
    given = problem(BIG)
    best = replace(BEST, dp_replicate=1, dp_shard=8, shard="parameters")
    told = compare_plans(
        given, replace(BEST, dp_replicate=1, tp=8, sequence_parallel=True), candidate(given, best)
    )
    gained = told.differences[-1]
    assert gained.kind == "data"
    assert gained.seconds < 0
    assert gained.cause == "best plan: DP 8, parameters sharded over 8"
    assert str(gained).startswith("best plan: DP 8, parameters sharded over 8: −")


def test_a_bubble_names_its_pipeline_and_micro_batches() -> None:
    given = problem(BIG)
    deep = replace(BEST, dp_replicate=2, pp=4, stage_cuts=(1, 2, 3), micro_batch=8)
    told = compare_plans(given, deep, candidate(given, replace(BEST, dp_replicate=8)))
    (bubble,) = [one for one in told.differences if one.kind == "bubble"]
    assert bubble.cause == "PP 4 with 4 micro-batches of 1f1b"
    assert bubble.seconds > 0


@given(
    st.sampled_from([(1, 1, 8), (1, 2, 4), (2, 2, 2), (4, 1, 2), (2, 1, 4)]),
    st.sampled_from(["none", "full"]),
    st.sampled_from([1, 2]),
)
@settings(max_examples=20, deadline=None)
def test_differences_add_up_to_that_of_the_steps(
    sizes: tuple[int, int, int], recompute: str, micro_batch: int
) -> None:
    given = problem(BIG)
    pp, tp, dp = sizes
    plan = replace(
        BEST,
        pp=pp,
        tp=tp,
        dp_replicate=dp,
        recompute=recompute,  # type: ignore[arg-type]  # one of its values
        stage_cuts={1: (), 2: (2,), 4: (1, 2, 3)}[pp],
        micro_batch=micro_batch,
    )
    best = candidate(given, replace(BEST, dp_replicate=8))
    told = compare_plans(given, plan, best)
    difference = told.forecast.step.seconds - best.seconds
    # Nine kinds, of which each may be too small to be named.
    assert sum(one.seconds for one in told.differences) == pytest.approx(
        difference, abs=9 * MIN_NAMED_SHARE * best.seconds
    )
    seconds = [one.seconds for one in told.differences]
    assert seconds == sorted(seconds, reverse=True)


def test_the_best_plan_is_as_fast_as_itself() -> None:
    given = problem()
    best = candidate(given, replace(BEST, dp_replicate=8))
    told = compare_plans(given, best.plan, best)
    assert (told.verdict, told.differences) == ("equal", ())


def test_a_plan_that_does_not_fit_says_where_how_much_and_what_would() -> None:
    deep = replace(BEST, dp_replicate=2, pp=4, stage_cuts=(1, 2, 3), micro_batch=2)
    roomy = problem()
    needed = forecast_plan_memory(roomy, deep)
    ranks = pipeline_rank_memory(
        roomy.workload,
        deep,
        "adamw",
        micro_batches=deep.gradient_accumulation_steps(16),
        dimensions=roomy.dimensions,
    )
    fullest = max(range(4), key=lambda rank: ranks[rank].total)
    given = problem(memory_bytes=int(needed.memory_bytes * 0.8))
    told = compare_plans(given, deep, None)
    assert told.verdict == "does not fit"
    assert f"stage {fullest} needs {bytes_text(needed.memory_bytes)}, the limit is" in told.sentence
    largest = max(MEMORY_KINDS, key=lambda field: getattr(needed, field))
    assert f"largest: {MEMORY_KINDS[largest]} {bytes_text(getattr(needed, largest))}" in told.sentence
    assert told.remedies
    assert f"{told.remedies[0]} would save" in told.sentence


def test_rules_come_before_forecasts() -> None:
    told = compare_plans(problem(), replace(BEST, dp_replicate=2, tp=3), None)
    assert (told.verdict, told.forecast) == ("invalid", None)
    assert told.sentence.startswith("invalid: parallel.tp = 3 does not divide model.heads = 8")


def test_what_wanma_does_not_run_is_a_forecast_only() -> None:
    told = compare_plans(problem(), replace(BEST, dp_replicate=8, fp8=True, approximate=("fp8",)), None)
    assert told.verdict == "unsupported"
    assert "does not allow it" in told.sentence
    assert told.forecast is not None


def test_among_plans_that_wanma_does_not_run_for_one_reason_the_slower_one_says_why_it_is() -> None:
    given = problem()
    foreign = Device("other", "TPU", 80 << 30, {"bf16": 1e14})
    given = replace(given, cluster=Cluster((replace(given.cluster.nodes[0], devices=(foreign,) * 8),)))
    best = replace(
        candidate(given, replace(BEST, dp_replicate=8)), unsupported_reason="wanma does not support TPU"
    )
    told = compare_plans(given, replace(BEST, dp_replicate=4), best)
    assert told.verdict == "slower"
    assert any("4 ranks instead of 8" in one.cause for one in told.differences)
    assert compare_plans(given, replace(BEST, dp_replicate=4), None).verdict == "unsupported"
