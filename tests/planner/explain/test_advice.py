"""Advice for plans that do not fit: it fits, it is small, and it says what it costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.problems import SMALL, job, problem
from wanma.job.plan.plan import Plan
from wanma.planner.explain.advice import ACCEPTABLE_SLOWDOWN, fitting_changes, memory_saving_changes
from wanma.planner.explain.plan_changes import change_families, changed_settings
from wanma.planner.forecast.plan_forecast import forecast_plan, forecast_plan_memory
from wanma.planner.forecast.plan_validity import invalid_plan_reason

PLAN = Plan(dp_replicate=8, micro_batch=2, precision="bf16", device="cuda")

plans = st.builds(
    lambda pp, tp, shard, micro_batch: replace(
        PLAN,
        pp=pp,
        tp=tp,
        dp_replicate=8 // pp // tp if shard == "none" else 1,
        dp_shard=1 if shard == "none" else 8 // pp // tp,
        shard=shard if 8 // pp // tp > 1 or shard == "none" else "none",
        stage_cuts=(2,) if pp == 2 else (),
        micro_batch=micro_batch,
    ),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.sampled_from(["none", "optimizer", "parameters"]),
    st.sampled_from([1, 2]),
)


def test_a_plan_that_fits_needs_no_advice() -> None:
    assert fitting_changes(problem(), PLAN) == []


@given(plans, st.floats(0.3, 0.999))
@settings(max_examples=25, deadline=None)
def test_every_advice_fits_is_allowed_and_says_what_it_costs(plan: Plan, share: float) -> None:
    given = problem(memory_bytes=int(forecast_plan_memory(problem(), plan).memory_bytes * share))
    before = forecast_plan(given, plan)
    changes = fitting_changes(given, plan)
    for change in changes:
        assert change.forecast == forecast_plan(given, change.plan)
        assert change.forecast.memory_bytes <= given.memory_limit_bytes
        assert change.saved_bytes == before.memory_bytes - change.forecast.memory_bytes
        assert invalid_plan_reason(given, change.plan) is None
        assert change.settings == changed_settings(plan, change.plan)
        assert change.plan.world_size == plan.world_size
        assert before.step is not None
        assert change.forecast.step is not None
        if change.slowdown is not None:
            assert change.forecast.step.seconds == pytest.approx(
                before.step.seconds * (1 + change.slowdown), rel=1e-9
            )
    known = [change.slowdown for change in changes if change.slowdown is not None]
    assert known == sorted(known)
    assert [change.slowdown for change in changes[: len(known)]] == known


def test_the_smallest_change_of_a_kind_is_taken() -> None:
    big = replace(PLAN, micro_batch=16)
    large = job(global_batch=128)
    sizes = {
        size: forecast_plan_memory(problem(large), replace(big, micro_batch=size)).memory_bytes
        for size in (2, 4, 8)
    }
    given = problem(large, memory_bytes=(sizes[4] + sizes[8]) // 2)
    (change,) = [one for one in fitting_changes(given, big) if list(one.settings) == ["parallel.micro_batch"]]
    assert change.settings == {"parallel.micro_batch": 4}
    assert str(change) == "parallel.micro_batch=4"


def test_cheap_single_changes_are_told_without_pairs() -> None:
    given = problem(memory_bytes=int(forecast_plan_memory(problem(), PLAN).memory_bytes * 0.9))
    changes = fitting_changes(given, PLAN)
    assert changes[0].slowdown <= ACCEPTABLE_SLOWDOWN
    of_one_family = [
        other
        for family in change_families(given).values()
        for other in family(PLAN)
        if invalid_plan_reason(given, other) is None
    ]
    assert all(change.plan in of_one_family for change in changes)


def test_where_one_change_is_not_enough_two_are_tried() -> None:
    given = problem()
    singles = [
        forecast_plan_memory(given, other).memory_bytes
        for family in change_families(given).values()
        for other in family(PLAN)
        if invalid_plan_reason(given, other) is None
    ]
    tight = problem(memory_bytes=min(singles) - 1)
    changes = fitting_changes(tight, PLAN)
    assert changes
    assert all(len(change.settings) > 1 for change in changes)


def test_what_is_moved_to_the_host_stands_where_its_time_puts_it() -> None:
    given = problem(memory_bytes=int(forecast_plan_memory(problem(), PLAN).memory_bytes * 0.7))
    quick, slow = (
        replace(given, hardware=replace(given.hardware, host=replace(given.hardware.host, **links)))
        for links in (
            {"link_bytes_per_second": 1e13, "memory_bytes_per_second": 1e13},
            {"link_bytes_per_second": 1e7},
        )
    )
    for of in (quick, slow):
        changes = fitting_changes(of, PLAN, keep=99)
        dear = [change.slowdown for change in changes]
        assert dear == sorted(dear, key=lambda one: one if one is not None else 99.0)
        assert any("offload" in str(change) for change in changes)
    assert "offload" in str(fitting_changes(quick, PLAN)[0])
    assert "offload" in str(fitting_changes(slow, PLAN, keep=99)[-1])


def test_nothing_is_said_where_nothing_helps() -> None:
    assert fitting_changes(problem(memory_bytes=1000), PLAN) == []


def test_savings_say_what_single_changes_would_give_back() -> None:
    given = problem()
    found = memory_saving_changes(given, PLAN, keep=99)
    saved = [change.saved_bytes for change in found]
    assert saved == sorted(saved, reverse=True)
    assert min(saved) > 0
    whole = forecast_plan_memory(given, PLAN).memory_bytes
    sharded = next(change for change in found if change.settings.get("parallel.shard") == "parameters")
    assert sharded.saved_bytes == whole - forecast_plan_memory(given, sharded.plan).memory_bytes


def test_settings_name_the_keys_of_a_job_with_what_they_become() -> None:
    after = replace(
        PLAN, dp_replicate=4, tp=2, sequence_parallel=True, recompute="selective", recompute_share=0.5
    )
    assert changed_settings(PLAN, after) == {
        "parallel.dp_replicate": 4,
        "parallel.tp": 2,
        "parallel.sequence_parallel": True,
        "parallel.recompute": "selective",
        "parallel.recompute_share": 0.5,
    }


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (replace(PLAN, dp_replicate=16), "16 ranks, and there are 8 devices"),
        (replace(PLAN, dp_replicate=1, tp=8, sequence_parallel=True), None),
        (replace(PLAN, dp_replicate=2, pp=4), "4 stages need 3 cuts, not 0"),
        (
            replace(PLAN, dp_replicate=2, pp=4, stage_cuts=(1, 2, 3), micro_batch=8),
            "needs at least 4, the number of stages",
        ),
        (replace(PLAN, dp_replicate=4, dp_shard=2), "parallel.shard = 'none' with parallel.dp_shard = 2"),
        (replace(PLAN, dp_replicate=4, ep=2), "the model has no experts"),
    ],
)
def test_rules_that_refuse_a_jobs_plan_refuse_any_plan(plan: Plan, said: str | None) -> None:
    reason = invalid_plan_reason(problem(), plan)
    assert (said is None and reason is None) or (said is not None and said in str(reason))


def test_heads_that_tp_does_not_divide_are_refused_by_key() -> None:
    odd = replace(SMALL, heads=6, kv_heads=6)
    assert "tp = 4 does not divide model.heads = 6" in str(
        invalid_plan_reason(problem(dimensions=odd), replace(PLAN, dp_replicate=2, tp=4))
    )
