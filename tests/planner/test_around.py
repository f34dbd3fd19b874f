"""Waiting for data and saving: what a thread does costs a step only where it takes longer than the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.problems import job, problem
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.planner.forecast.data_loading import (
    MICRO_BATCH_LOAD_SECONDS,
    PIXEL_LOAD_SECONDS,
    TOKEN_LOAD_SECONDS,
)
from wanma.planner.forecast.plan_forecast import forecast_plan, forecast_step_time
from wanma.planner.forecast.problem import PlanningProblem
from wanma.planner.forecast.run_cost import run_seconds
from wanma.planner.forecast.step_overhead import (
    CPU_COPY_BYTES_PER_SECOND,
    HANDOFF_SECONDS,
    HASH_BYTES_PER_SECOND,
    StepOverhead,
    step_overhead,
)
from wanma.planner.search.branch_and_bound import search
from wanma.planner.search.space import SearchSpace, enumerate_plans

PLAN = Plan(dp_replicate=4, micro_batch=2, precision="bf16", device="cuda")
DISK = 2e9


def with_section(of: Job, name: str, **keys: Any) -> Job:
    return of.model_copy(update={name: getattr(of, name).model_copy(update=keys)})


def given_problem(of: Job | None = None, **host: Any) -> PlanningProblem:
    made = problem(of or with_section(job(), "data", workers=1))
    rates = {"disk_bytes_per_second": DISK, **host}
    return replace(made, hardware=replace(made.hardware, host=replace(made.hardware.host, **rates)))


def saved_bytes(of: PlanningProblem) -> float:
    return 12.0 * of.workload.parameters


# ------------------------------------------------------------------ data


def test_text_is_read_in_the_background_by_micro_batches_and_tokens() -> None:
    found = step_overhead(given_problem(), PLAN)
    # Four of sixteen samples on each data rank, 513 tokens each, in two micro-batches.
    assert found.load_seconds == pytest.approx(
        2 * MICRO_BATCH_LOAD_SECONDS + 4 * 513 * (TOKEN_LOAD_SECONDS + 4 / DISK)
    )
    pipelined = replace(PLAN, pp=2, stage_cuts=(2,))  # every rank reads all of its data rank's
    assert step_overhead(given_problem(), pipelined).load_seconds == pytest.approx(found.load_seconds)


def test_more_loader_threads_share_it_as_far_as_steps_are_loaded_ahead() -> None:
    one = step_overhead(given_problem(), PLAN).load_seconds
    for workers, prefetch, at_once in ((2, 4, 2), (8, 4, 4), (4, 1, 1)):
        of = given_problem(with_section(job(), "data", workers=workers, prefetch=prefetch))
        assert step_overhead(of, PLAN).load_seconds == pytest.approx(one / at_once)


def test_images_are_read_by_their_numbers() -> None:
    of = given_problem()
    of = replace(of, workload=replace(of.workload, input_elements_per_sample=3 * 224 * 224))
    found = step_overhead(of, PLAN).load_seconds
    assert found == pytest.approx(
        2 * MICRO_BATCH_LOAD_SECONDS + 4 * 3 * 224 * 224 * (PIXEL_LOAD_SECONDS + 1 / DISK)
    )


def test_of_ones_own_data_set_nobody_knows() -> None:
    of = given_problem(with_section(job(), "data", text=[], factory="mine:data"))
    assert step_overhead(of, PLAN).load_seconds == 0.0


def test_only_what_computing_does_not_hide_is_waited_for() -> None:
    usual = forecast_step_time(given_problem(), PLAN)
    assert usual.loading == HANDOFF_SECONDS
    slow = given_problem(disk_bytes_per_second=1e3)
    step = forecast_step_time(slow, PLAN)
    load = step_overhead(slow, PLAN).load_seconds
    assert step.loading == pytest.approx(
        HANDOFF_SECONDS + load - (usual.seconds - usual.loading - usual.checkpoint)
    )


# ------------------------------------------------------------------ saving


def test_a_save_is_copied_by_all_ranks_over_their_own_links() -> None:
    of = given_problem(with_section(job(), "checkpoint", every_steps=10), link_bytes_per_second=5e9)
    found = step_overhead(of, PLAN)
    assert found.checkpoint_copy_seconds == pytest.approx(saved_bytes(of) / 4 / 5e9)
    on_cpu = step_overhead(of, replace(PLAN, device="cpu"))
    assert on_cpu.checkpoint_copy_seconds == pytest.approx(saved_bytes(of) / 4 / CPU_COPY_BYTES_PER_SECOND)
    # The cores that hash it would have computed; beside a GPU there are others.
    hashed = saved_bytes(of) / 4 / HASH_BYTES_PER_SECOND
    assert found.hash_slowdown_seconds == 0.0
    assert on_cpu.hash_slowdown_seconds == pytest.approx(hashed)
    two = step_overhead(of, replace(PLAN, device="cpu", threads_per_rank=2))
    assert two.hash_slowdown_seconds == pytest.approx(hashed / 2)
    assert on_cpu.checkpoint_stall(1e9) == pytest.approx((on_cpu.checkpoint_copy_seconds + hashed) / 10)
    average = given_problem(job(weight_average=0.99))
    assert step_overhead(average, PLAN).checkpoint_write_seconds == pytest.approx(
        16 / 12 * step_overhead(of, PLAN).checkpoint_write_seconds
    )


def test_state_in_files_is_copied_into_files() -> None:
    of = given_problem(file_read_bytes_per_second=4e9, file_write_bytes_per_second=1e9)
    found = step_overhead(of, replace(PLAN, offload_optimizer="disk"))
    assert found.checkpoint_copy_seconds == pytest.approx(saved_bytes(of) / 4 * (1 / 4e9 + 1 / 1e9))


def test_it_is_written_as_fast_as_the_disk_takes_it_and_a_core_hashes_it() -> None:
    of = given_problem(disk_bytes_per_second=1e7)  # a rank's share where all devices use it
    whole = 1e7 * of.hardware.device_count
    assert step_overhead(of, PLAN).checkpoint_write_seconds == pytest.approx(saved_bytes(of) / whole)
    quick = given_problem(disk_bytes_per_second=1e10)
    assert step_overhead(quick, PLAN).checkpoint_write_seconds == pytest.approx(
        saved_bytes(of) / 4 / HASH_BYTES_PER_SECOND
    )


def test_a_save_that_is_written_longer_than_the_steps_between_is_waited_for() -> None:
    found = StepOverhead(
        0.0,
        0.0,
        0.5,
        checkpoint_write_seconds=8.0,
        hash_slowdown_seconds=0.0,
        checkpoint_every_steps=4,
        saves_at_last_step=True,
    )
    assert found.checkpoint_stall(3.0) == 0.5 / 4
    assert found.checkpoint_stall(1.5) == pytest.approx(0.5 / 4 + (8.0 - 4 * 1.5) / 4)
    assert [found.checkpoint_forecast(seconds).stall_seconds for seconds in (3.0, 1.5)] == [0.5, 2.5]
    assert found.final_checkpoint_seconds == 8.0


def test_a_run_also_waits_for_its_last_save() -> None:
    for every, steps, shares, copies in (
        (10, 100, 1 / 10, 0),
        (0, 100, 0, 1),
        (200, 100, 0, 1),
        (30, 100, 1 / 30, 1),
    ):
        of = given_problem(with_section(job(steps=steps), "checkpoint", every_steps=every))
        parts, found = step_overhead(of, PLAN), forecast_plan(of, PLAN)
        assert found.step.checkpoint == pytest.approx(parts.checkpoint_copy_seconds * shares, abs=1e-12)
        assert found.checkpoint.size_bytes == pytest.approx(saved_bytes(of))
        assert found.checkpoint.write_seconds == parts.checkpoint_write_seconds
        steps_seconds = run_seconds(of.job.train, of.global_batch, PLAN, found.step)
        at_end = parts.checkpoint_write_seconds + copies * parts.checkpoint_copy_seconds
        assert found.run.seconds == pytest.approx(steps_seconds / found.run.useful.share + at_end)


# ------------------------------------------------------------------ both


@given(
    st.builds(
        StepOverhead,
        st.floats(0, 10),
        st.floats(0, 1),
        st.floats(0, 10),
        st.floats(0, 100),
        st.floats(0, 10),
        st.integers(0, 50),
        st.booleans(),
    ),
    st.floats(0, 20),
    st.floats(0, 5),
)
def test_many_steps_at_once_are_as_each_alone_and_a_longer_one_is_never_over_sooner(
    parts: StepOverhead, seconds: float, more: float
) -> None:
    both = parts.with_stalls(np.array([seconds, seconds + more]))
    loading = parts.loading_stall(seconds)
    assert both[0] == pytest.approx(seconds + loading + parts.checkpoint_stall(seconds + loading))
    assert both[1] >= both[0]


@pytest.mark.parametrize(("every", "disk"), [(1, 1e8), (2, 2e9), (100, 1e4)])
def test_a_search_finds_the_best_plan_also_where_data_or_saves_are_waited_for(
    every: int, disk: float
) -> None:
    of = given_problem(
        with_section(job(global_batch=8), "checkpoint", every_steps=every), disk_bytes_per_second=disk
    )
    space = SearchSpace.unrestricted(
        of.job,
        of.cluster,
        of.dimensions,
        world_sizes=(4,),
        schedules=(("1f1b", 1),),
        compile=(False,),
        cp_method=("ring",),
        cp=(1,),
    )
    fastest = min(
        step.seconds
        for plan in enumerate_plans(space, of.workload)
        if (step := forecast_step_time(of, plan)) is not None
    )
    best = search(of, space, keep=1).best
    assert best.seconds == pytest.approx(fastest, rel=1e-9)
