"""parallel.recompute = "auto": as little as lets the plan fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wanma.job.cluster import Cluster, Device, NodeGroup
from wanma.job.errors import JobError
from wanma.job.forecast.forecast import LayerWorkload, Workload
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.planner.forecast.problem import USABLE_DEVICE_MEMORY_SHARE
from wanma.planner.job_planner import PlanResult, build_layout, choose_recompute, complete_plan
from wanma.planner.memory.peak import CUDA_CONTEXT_BYTES, forecast_memory

GIB = 1 << 30
MODEL = Workload(
    (
        LayerWorkload("embedding", 1, 1_000_000, 0.0, 0.0),
        LayerWorkload("layers", 8, 1_000_000, 1e9, 100e6, 5e6, 35e6),
        LayerWorkload("head", 1, 1_000_000, 1e8, 10e6),
    ),
    tokens_per_sample=4096,
)


def memory(gib: float) -> int:
    """GPU that has `gib` beside the memory that CUDA takes."""
    return int(gib * GIB + CUDA_CONTEXT_BYTES / USABLE_DEVICE_MEMORY_SHARE)


def on(memory_gib: float, **parallel: object) -> PlanResult:
    job = Job.model_validate(
        {
            "model": {"preset": "gpt-1m"},
            "train": {"global_batch": 1},
            "parallel": {"recompute": "auto", **parallel},
        }
    )
    gpu = Device("cuda", "GPU", memory(memory_gib), {})
    cluster = Cluster((NodeGroup("box", 64, 512 * GIB, (gpu,) * 2),))
    return complete_plan(job, build_layout(job, cluster), cluster, MODEL)


def test_nothing_recomputes_where_everything_fits() -> None:
    planned = on(80)
    assert planned.plan.recompute == "none"
    assert "recompute none: all activations fit" in planned.forecast.reasons


@pytest.mark.parametrize("memory_gib", [3.6, 3.0, 2.6, 2.2, 1.6, 1.0])
def test_the_chosen_one_fits_and_whatever_costs_less_does_not(memory_gib: float) -> None:
    planned = on(memory_gib)
    plan, limit = planned.plan, memory(memory_gib) * USABLE_DEVICE_MEMORY_SHARE
    assert plan.recompute != "none"
    assert planned.forecast.memory_bytes <= limit
    chosen = plan.recompute_share * (0.5 if plan.recompute == "selective" else 1.0)
    cheaper = [
        replace(plan, recompute=mode, recompute_share=number / 8)
        for mode, cost in (("selective", 0.5), ("full", 1.0))
        for number in range(1, 9)
        if cost * number / 8 < chosen
    ]
    for option in cheaper:
        assert forecast_memory(MODEL, option, "adamw", micro_batches=1).memory_bytes > limit


def test_it_goes_from_none_over_selective_to_full_as_memory_shrinks() -> None:
    modes = [on(gib).plan for gib in (5.0, 3.0, 1.0)]
    assert [plan.recompute for plan in modes] == ["none", "selective", "full"]
    assert 0 < modes[1].recompute_share < 1


def test_a_stage_of_a_pipeline_has_fewer_blocks_to_choose_from() -> None:
    plan, reason = choose_recompute(Plan(pp=4), MODEL, lambda plan: plan.recompute == "full")
    assert (plan.recompute, plan.recompute_share) == ("full", 0.5)
    assert reason == "recompute full of 1 of 2 blocks: the least that fits"


def test_a_schedule_that_takes_backward_apart_recomputes_nothing() -> None:
    plan, reason = choose_recompute(Plan(pp=2, schedule="zbv", virtual_stages=2), MODEL, lambda _: False)
    assert plan.recompute == "none"
    assert "schedule zbv" in reason


def test_what_does_not_fit_with_everything_recomputed_is_refused() -> None:
    with pytest.raises(JobError, match="the plan does not fit"):
        on(0.2)


def test_a_model_of_ones_own_has_no_forecast_to_choose_by() -> None:
    job = Job.model_validate({"model": {"factory": "a:b"}, "parallel": {"recompute": "auto"}})
    cluster = Cluster((NodeGroup("laptop", 8, 16 * GIB, ()),))
    with pytest.raises(JobError, match=r"parallel\.recompute = 'auto'"):
        complete_plan(job, build_layout(job, cluster), cluster, None)
