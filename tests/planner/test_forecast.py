"""A plan's whole forecast: what its parts make, and what follows from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.planner.step_times import decoder_step_time

from support.problems import SMALL, job, problem
from wanma.job.errors import JobError
from wanma.job.forecast.forecast import STEP_TIME_KINDS
from wanma.job.plan.plan import Plan
from wanma.planner.forecast.plan_forecast import forecast_plan, step_time_text, with_pipeline_rank_memory
from wanma.planner.forecast.run_cost import run_cost
from wanma.planner.forecast.step_overhead import HANDOFF_SECONDS

PLAN = Plan(dp_shard=4, tp=2, sequence_parallel=True, shard="parameters", precision="bf16", device="cuda")


def test_it_is_the_time_of_the_step_with_its_share_of_saving() -> None:
    given = problem(job(global_batch=64))
    found = forecast_plan(given, PLAN)
    alone = decoder_step_time(SMALL, 512, PLAN, 64, given.hardware)
    saving = 12 * given.workload.parameters / 8 / given.hardware.host.link_bytes_per_second / 100
    assert found.step.checkpoint == pytest.approx(saving)
    assert found.step.loading == pytest.approx(HANDOFF_SECONDS)
    assert found.step.seconds == pytest.approx(alone.seconds + HANDOFF_SECONDS + saving)
    assert found.samples_per_second == pytest.approx(64 / found.step.seconds)
    assert found.run == run_cost(given, PLAN, found.step)
    flops = given.workload.flops_per_sample * 64
    assert found.model_flops_utilisation == pytest.approx(flops / found.step.seconds / (8 * 100e12))


def test_each_rank_of_a_pipeline_has_a_forecast_of_its_memory() -> None:
    deep = replace(PLAN, pp=2, dp_shard=2, stage_cuts=(2,), micro_batch=1)
    given = problem(job(global_batch=64))
    found = with_pipeline_rank_memory(given, deep, forecast_plan(given, deep))
    first, last = found.pipeline_ranks
    assert max(first.memory_bytes, last.memory_bytes) == found.memory_bytes
    assert first.memory_bytes != last.memory_bytes
    assert found.tensor_bytes in (first.tensor_bytes, last.tensor_bytes)
    flat = forecast_plan(given, PLAN)
    assert with_pipeline_rank_memory(given, PLAN, flat) == flat


def test_an_optimizer_of_ones_own_is_told_to_be_counted_as_adamw() -> None:
    own, plain = (
        forecast_plan(problem(one), PLAN) for one in (job(optimizer_factory="torch.optim:RAdam"), job())
    )
    assert own.optimizer_bytes == plain.optimizer_bytes
    told = [one for one in own.reasons if "torch.optim:RAdam" in one]
    assert len(told) == 1
    assert "as large as AdamW's" in told[0]
    assert not any("AdamW" in one for one in plain.reasons)


def test_without_checkpoints_nothing_is_saved() -> None:
    never = job().model_copy(update={"checkpoint": job().checkpoint.model_copy(update={"every_steps": 0})})
    found = forecast_plan(problem(never), PLAN)
    assert found.step.checkpoint == 0.0


def test_a_compiled_plan_is_forecast_with_fused_operators() -> None:
    plain, compiled = (forecast_plan(problem(), replace(PLAN, compile=fused)).step for fused in (False, True))
    assert compiled.compute < plain.compute


def test_memory_is_forecast_where_rates_are_unknown_and_why_there_is_no_time() -> None:
    found = forecast_plan(problem(), replace(PLAN, precision="fp64"))
    assert found.step is None
    assert found.parameters_bytes > 0
    assert found.reasons[-1] == (
        "step time unknown: test chip has no rate for fp64 products (known: bf16, fp16, fp8)"
    )


def test_a_forecast_says_what_nobody_measured_of_its_machine() -> None:
    given = problem()
    guessed = replace(given, hardware=replace(given.hardware, assumed=("test chip: taken to be another",)))
    assert forecast_plan(guessed, PLAN).reasons[-1] == "test chip: taken to be another"


def test_a_machine_whose_rates_nobody_knows_says_how_to_give_them() -> None:
    given = problem()
    nameless = replace(given, hardware=replace(given.hardware, unknown="measure it with `wanma cluster`"))
    found = forecast_plan(nameless, PLAN)
    assert found.step is None
    assert found.reasons[-1] == "step time unknown: measure it with `wanma cluster`"


def test_more_ranks_than_devices_are_refused() -> None:
    with pytest.raises(JobError, match=r"32 ranks, .* 16 devices"):
        forecast_plan(problem(), replace(PLAN, dp_replicate=4))


def test_where_time_goes_names_what_is_a_twentieth_or_more() -> None:
    step = forecast_plan(problem(), PLAN).step
    text = step_time_text(step)
    assert text.startswith("step time: ")
    for field, name in STEP_TIME_KINDS.items():
        share = getattr(step, field) / step.seconds
        assert (f"{name} {share:.0%}" in text) == (share >= 0.05)
