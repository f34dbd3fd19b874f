"""Pipelines before anything starts: cuts against all possible ones, schedules against torch's own classes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from benchmarks.parallel.bubble_runs import bubble_fraction
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from support.schedules import comes_to_an_end, fake_stages, most_kept, step_time
from wanma.job.forecast.forecast import LayerWorkload, Workload
from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Recompute, Schedule
from wanma.parallel.pipeline.pipeline_runner import SCHEDULES
from wanma.planner.pipeline.schedules import (
    DEFAULT_VIRTUAL_STAGES,
    INTERLEAVED,
    balanced_cuts,
    blocks_of_stages,
    in_flight_by_stage,
    invalid_cuts_reason,
    invalid_micro_batches_reason,
    invalid_virtual_stages_reason,
    plan_stage_cuts,
)

# ------------------------------------------------------------------ cuts


def stage_costs(
    costs: list[float], cuts: tuple[int, ...], first: float | None, last: float | None
) -> list[float] | None:
    """None where a stage would be empty."""
    bounds = [0, *cuts, len(costs)]
    stages = []
    for stage, (start, stop) in enumerate(itertools.pairwise(bounds)):
        held = [first] if stage == 0 and first is not None else []
        held += [last] if stage == len(cuts) and last is not None else []
        if start == stop and not held:
            return None
        stages.append(sum(costs[start:stop]) + sum(held))
    return stages


@given(
    costs=st.lists(st.integers(0, 9), max_size=7),
    stages=st.integers(1, 5),
    first=st.none() | st.integers(0, 12),
    last=st.none() | st.integers(0, 12),
)
def test_no_other_cuts_have_a_cheaper_dearest_stage_or_are_as_good_and_more_even(
    costs: list[float], stages: int, first: float | None, last: float | None
) -> None:
    possible = {}
    for cuts in itertools.combinations_with_replacement(range(len(costs) + 1), stages - 1):
        of_stages = stage_costs(costs, cuts, first, last)
        if of_stages is not None:
            possible[cuts] = (max(of_stages), sum(cost * cost for cost in of_stages), cuts)
    if not possible:
        with pytest.raises(ValueError, match=f"{len(costs)} blocks .* {stages} stages"):
            balanced_cuts(costs, stages, first, last)
        return
    chosen = balanced_cuts(costs, stages, first, last)
    best = min(possible.values())
    assert possible[chosen][0] == best[0]
    assert math.isclose(possible[chosen][1], best[1], rel_tol=1e-5)  # evenness is compared in a million steps
    assert invalid_cuts_reason(chosen, len(costs), stages, first is not None, last is not None) is None


def test_of_equal_cuts_earlier_stages_get_fewer_blocks() -> None:
    assert balanced_cuts([1.0] * 5, 2, 0.0, 0.0) == (2,)
    assert balanced_cuts([1.0] * 6, 4, 0.0, 0.0) == (1, 2, 4)


def test_a_head_that_costs_as_much_as_three_blocks_leaves_the_last_stage_three_blocks_less() -> None:
    assert balanced_cuts([1.0] * 9, 2, 0.0, 3.0) == (6,)
    assert balanced_cuts([1.0] * 3, 2, 0.0, 9.0) == (3,), "a stage with only the head"


def test_a_126_block_model_on_16_ranks_is_cut_in_a_moment() -> None:
    cuts = balanced_cuts([1.0] * 126, 16, 0.0, 2.0)
    sizes = [stop - start for start, stop in itertools.pairwise((0, *cuts, 126))]
    assert max(sizes) == 8
    assert sizes[-1] == 6


DECODER = Workload(
    (
        LayerWorkload("embedding", 1, 1000, 0.0, 0.0),
        LayerWorkload("layers", 8, 1000, 10.0, 1.0),
        LayerWorkload("head", 1, 1000, 40.0, 1.0),
    ),
    tokens_per_sample=16,
)


def test_a_models_cuts_follow_its_flops() -> None:
    assert plan_stage_cuts(DECODER, Plan(pp=2), 8) == (6,)
    assert plan_stage_cuts(DECODER, Plan(pp=2, schedule="zbv", virtual_stages=2), 8) == (2, 5, 8)


def test_recompute_makes_blocks_dearer_next_to_the_head() -> None:
    plan = Plan(pp=2, recompute="full")
    blocks = Workload((*DECODER.layers[:2], LayerWorkload("head", 1, 1000, 35.0, 1.0)), 16)
    assert plan_stage_cuts(blocks, Plan(pp=2), 8) == (6,)
    assert plan_stage_cuts(blocks, plan, 8) == (5,)


@pytest.mark.parametrize(
    ("recompute", "share", "again"),
    [("none", 1.0, 0.0), ("selective", 1.0, 0.5), ("selective", 0.5, 0.25), ("full", 1.0, 1.0)],
)
def test_cuts_count_what_the_plans_recompute_runs_again(
    recompute: Recompute, share: float, again: float
) -> None:
    head = 3.2  # blocks
    layers = (
        LayerWorkload("embedding", 1, 0, 0.0, 0.0),
        LayerWorkload("block", 8, 0, 1.0, 0.0),
        LayerWorkload("head", 1, 0, head, 0.0),
    )
    plan = Plan(pp=2, recompute=recompute, recompute_share=share)
    (cut,) = plan_stage_cuts(Workload(layers, 1), plan, 8)
    dearest = [max((3 + again) * first, (3 + again) * (8 - first) + 3 * head) for first in range(9)]
    assert dearest[cut] == min(dearest)
    assert cut == (6 if again < 0.2 else 5)


def test_blocks_that_nobody_measured_count_alike() -> None:
    assert plan_stage_cuts(None, Plan(pp=4), 8) == (2, 4, 6)
    assert plan_stage_cuts(None, Plan(pp=4), 1) == ()


@pytest.mark.parametrize(
    ("cuts", "says"),
    [
        ((2,), "3 stages need 2 cuts, not 1"),
        ((2, 9), "cuts must lie between 0 and 4"),
        ((3, 2), "cuts must increase: 2 comes after 3"),
        ((2, 2), "stage 1 of 3 would be empty"),
        ((0, 2), None),
        ((2, 4), None),
    ],
)
def test_wrong_cuts_are_told(cuts: tuple[int, ...], says: str | None) -> None:
    reason = invalid_cuts_reason(cuts, 4, 3, has_pre_block=True, has_post_block=True)
    assert reason is None if says is None else says in str(reason)


def test_an_end_without_anything_else_needs_a_block() -> None:
    assert (
        invalid_cuts_reason((0,), 4, 2, has_pre_block=False, has_post_block=True)
        == "stage 0 of 2 would be empty"
    )
    assert (
        invalid_cuts_reason((4,), 4, 2, has_pre_block=True, has_post_block=False)
        == "stage 1 of 2 would be empty"
    )
    assert (
        invalid_cuts_reason((1,), 1, 4, has_pre_block=True, has_post_block=True)
        == "1 blocks cannot be split into 4 stages"
    )


# ------------------------------------------------------------------ schedules


def made(plan: Plan, micro_batches: int) -> Any:
    """torch's schedule on rank 0.

    Raises:
        ValueError: torch refuses it.
    """
    kind: Any = SCHEDULES[plan.schedule]
    stages = fake_stages(plan)
    first = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    return kind(first, n_microbatches=micro_batches)


SCHEDULE: st.SearchStrategy[Schedule] = st.sampled_from(list(SCHEDULES))


@settings(max_examples=60, deadline=None)
@given(schedule=SCHEDULE, pp=st.integers(2, 6), virtual=st.integers(1, 3), count=st.integers(1, 20))
def test_a_schedule_is_admitted_exactly_where_torch_takes_it_and_then_cannot_hang(
    schedule: Schedule, pp: int, virtual: int, count: int
) -> None:
    virtual = virtual if schedule in INTERLEAVED else DEFAULT_VIRTUAL_STAGES[schedule]
    plan = Plan(pp=pp, schedule=schedule, virtual_stages=virtual)
    reason = invalid_micro_batches_reason(schedule, pp, count)
    if reason is not None:
        with pytest.raises(ValueError, match="microbatches"):
            made(plan, count)
        return
    torchs = made(plan, count)
    if not isinstance(torchs, PipelineScheduleSingle):
        assert comes_to_an_end(torchs.pipeline_order_with_comms, plan)


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_v_shaped_schedules_want_two_stages_per_rank_in_torch_too(schedule: Schedule) -> None:
    assert "2 stages per rank" in str(invalid_virtual_stages_reason(schedule, 3))
    with pytest.raises(ValueError, match="exactly 2 stages"):
        SCHEDULES[schedule](fake_stages(Plan(pp=2, virtual_stages=3, schedule="interleaved_1f1b")), 8)  # type: ignore[arg-type]


def test_only_interleaved_schedules_take_any_number_of_stages_per_rank() -> None:
    assert invalid_virtual_stages_reason("1f1b", 2) == "schedule '1f1b' has 1 stage per rank"
    assert invalid_virtual_stages_reason("gpipe", 1) is None
    assert invalid_virtual_stages_reason("interleaved_1f1b", 4) is None
    assert invalid_virtual_stages_reason("interleaved_zero_bubble", 1) is None


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "1f1b"])
@pytest.mark.parametrize(("pp", "count"), [(2, 4), (2, 8), (4, 8), (4, 16)])
def test_the_bubble_is_what_torchs_own_order_of_actions_costs(
    schedule: Schedule, pp: int, count: int
) -> None:
    # torch has a list of actions for 1F1B too, but does not run it.
    virtual = DEFAULT_VIRTUAL_STAGES[schedule]
    plan = Plan(pp=pp, schedule=schedule, virtual_stages=virtual)
    total = step_time(made(plan, count).pipeline_order, plan)
    assert bubble_fraction(schedule, pp, virtual, count) == pytest.approx(1 - 3 * virtual * count / total)


def test_the_bubble_of_1f1b_is_gpipes() -> None:
    assert bubble_fraction("1f1b", 4, 1, 8) == bubble_fraction("gpipe", 4, 1, 8) == 3 / 11


@settings(max_examples=60, deadline=None)
@given(
    schedule=st.sampled_from([name for name in SCHEDULES if name != "1f1b"]),
    pp=st.integers(2, 6),
    virtual=st.integers(1, 3),
    count=st.integers(1, 20),
)
def test_a_rank_keeps_the_activations_that_torchs_order_of_actions_keeps(
    schedule: Schedule, pp: int, virtual: int, count: int
) -> None:
    virtual = virtual if schedule in INTERLEAVED else DEFAULT_VIRTUAL_STAGES[schedule]
    if invalid_micro_batches_reason(schedule, pp, count) is None:
        plan = Plan(pp=pp, schedule=schedule, virtual_stages=virtual)
        orders = made(plan, count).pipeline_order
        for rank, actions in orders.items():
            of_stages = in_flight_by_stage(schedule, pp, virtual, count, rank)
            assert len(of_stages) == virtual
            assert sum(of_stages) == most_kept({rank: actions})


def test_a_looped_rank_keeps_more_of_the_stages_that_come_first() -> None:
    # torch's own order of actions, at its fullest.
    assert in_flight_by_stage("interleaved_1f1b", 4, 2, 8, 0) == (7, 4)
    assert in_flight_by_stage("interleaved_1f1b", 4, 3, 16, 2) == (4, 4, 3)
    assert in_flight_by_stage("zbv", 4, 2, 8, 1) == (6, 2)
    assert in_flight_by_stage("dualpipev", 4, 2, 8, 3) == (5, 4)
    assert [in_flight_by_stage("1f1b", 4, 1, 8, rank) for rank in range(4)] == [(4,), (3,), (2,), (1,)]


def test_blocks_are_as_even_as_can_be_with_fewer_where_the_ends_are() -> None:
    assert blocks_of_stages(16, Plan(pp=4)) == [4, 4, 4, 4]
    assert blocks_of_stages(14, Plan(pp=4)) == [3, 4, 4, 3]
    assert blocks_of_stages(17, Plan(pp=4)) == [4, 5, 4, 4]
    assert blocks_of_stages(16, Plan(pp=2, stage_cuts=(5,))) == [5, 11]
