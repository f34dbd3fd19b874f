"""Schedules played through, against their published bubbles and by-hand cases."""

from __future__ import annotations

from itertools import accumulate

import pytest
from benchmarks.parallel.bubble_runs import bubble_fraction
from hypothesis import example, given, settings
from hypothesis import strategies as st

from wanma.job.sections.parallel import Schedule
from wanma.planner.pipeline.schedules import in_flight_by_stage
from wanma.planner.pipeline.simulation import (
    Operation,
    StageCost,
    _simulate,
    simulate_pipeline,
    simulate_pipeline_intervals,
)
from wanma.planner.pipeline.static_simulation import PipelineShape, operation_orders

WHOLE = StageCost(1.0, 2.0)
SPLIT = StageCost(1.0, 1.0, 1.0)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "micro_batches"), [(1, 3), (4, 4), (4, 8), (4, 40), (8, 64)])
def test_equal_stages_and_free_links_give_the_published_bubble(
    schedule: Schedule, pp: int, micro_batches: int
) -> None:
    played = simulate_pipeline(schedule, [WHOLE] * pp, pp, micro_batches)
    assert played.bubble_seconds / played.seconds == pytest.approx(
        bubble_fraction(schedule, pp, 1, micro_batches)
    )


@pytest.mark.parametrize(("pp", "virtual", "micro_batches"), [(4, 2, 8), (4, 2, 40), (8, 3, 64), (2, 4, 2)])
def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank(
    pp: int, virtual: int, micro_batches: int
) -> None:
    played = simulate_pipeline("interleaved_1f1b", [WHOLE] * (pp * virtual), pp, micro_batches)
    expected = bubble_fraction("interleaved_1f1b", pp, virtual, micro_batches)
    assert played.bubble_seconds / played.seconds == pytest.approx(expected)


@pytest.mark.parametrize(("schedule", "virtual"), [("interleaved_zero_bubble", 1), ("zbv", 2)])
@pytest.mark.parametrize(("pp", "micro_batches"), [(4, 8), (8, 40)])
def test_weight_gradients_fill_most_of_the_bubble(
    schedule: Schedule, virtual: int, pp: int, micro_batches: int
) -> None:
    played = simulate_pipeline(schedule, [SPLIT] * (pp * virtual), pp, micro_batches)
    whole = bubble_fraction("1f1b", pp, virtual, micro_batches)
    assert played.bubble_seconds / played.seconds < 0.65 * whole


def test_more_activations_in_flight_leave_a_smaller_bubble() -> None:
    few, many = (
        simulate_pipeline("interleaved_zero_bubble", [SPLIT] * 4, 4, 12, 0.0, in_flight)
        for in_flight in (4, 8)
    )
    assert many.seconds < few.seconds


def test_the_slowest_stage_sets_the_pace() -> None:
    costs = [StageCost(1.0, 2.0), StageCost(2.0, 4.0)]
    assert simulate_pipeline("1f1b", costs, 2, 10).seconds == pytest.approx(1 + 10 * 6 + 2)


def test_each_send_is_waited_for_at_both_ends_and_once_per_round() -> None:
    # Two stages, one micro-batch: forward, send, forward, backward, send, backward.
    assert simulate_pipeline("1f1b", [WHOLE] * 2, 2, 1, send_seconds=0.5).seconds == pytest.approx(7.0)
    free, sent = (simulate_pipeline("1f1b", [WHOLE] * 2, 2, 40, send) for send in (0.0, 0.5))
    assert sent.seconds > free.seconds + 1.0


@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 3)],
)
def test_a_rank_holds_as_many_stages_as_the_memory_forecast_says(schedule: Schedule, virtual: int) -> None:
    size = PipelineShape(4, 4 * virtual, 16)
    first = [size.operation(number) for number in operation_orders(schedule, size)[0]]
    held = [1 if operation.kind == "forward" else -1 for operation in first]
    assert max(accumulate(held)) == sum(in_flight_by_stage(schedule, 4, virtual, 16, 0))
    assert sum(held) == 0


@settings(max_examples=30, deadline=None)
@example([1.0, 1.90625, 0.5, 1.84375], 15, "1f1b")  # two stages that cost nearly the same
@given(
    st.lists(st.floats(0.1, 3.0), min_size=4, max_size=4),
    st.integers(1, 60),
    st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b"]),
)
def test_what_is_not_played_adds_up_to_the_same(
    forwards: list[float], rounds: int, schedule: Schedule
) -> None:
    pp = 4 if schedule != "interleaved_1f1b" else 2
    costs = [StageCost(forward, 2 * forward) for forward in forwards]
    micro_batches = rounds * pp
    whole = simulate_pipeline(schedule, costs, pp, micro_batches, 0.05)
    # Between a rank that never waits and stages that run one after the other.
    alone = [sum(costs[stage].seconds for stage in range(rank, 4, pp)) for rank in range(pp)]
    least = max(alone) * micro_batches
    assert least <= whole.seconds + 1e-9
    assert whole.seconds <= sum(cost.seconds for cost in costs) * micro_batches + 0.1 * 4 * micro_batches
    assert max(whole.compute_seconds) == pytest.approx(least)
    played = _simulate(schedule, costs, pp, micro_batches, 0.05, None)
    assert whole.seconds == pytest.approx(played.seconds, rel=0.02)


def test_too_little_memory_for_one_micro_batch_is_told() -> None:
    with pytest.raises(ValueError, match="1 stages in flight"):
        simulate_pipeline("zbv", [SPLIT] * 4, 2, 4, 0.0, in_flight=1)


def test_stages_that_do_not_fill_the_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="3 stages on 2 ranks"):
        simulate_pipeline("1f1b", [WHOLE] * 3, 2, 4)


@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_zero_bubble", 2), ("zbv", 2)],
)
def test_intervals_are_the_played_schedule_operation_by_operation(schedule: Schedule, virtual: int) -> None:
    pp, micro_batches, send = 4, 8, 0.125
    costs = [SPLIT if "zero" in schedule or "zb" in schedule else WHOLE] * (pp * virtual)
    intervals = simulate_pipeline_intervals(schedule, costs, pp, micro_batches, send)
    played = simulate_pipeline(schedule, costs, pp, micro_batches, send)
    assert max(one.start + one.seconds for one in intervals) == pytest.approx(played.seconds)
    assert len({one.operation for one in intervals}) == len(intervals)
    for rank in range(pp):
        mine = [one for one in intervals if one.rank == rank]
        assert sum(one.seconds for one in mine) == pytest.approx(played.compute_seconds[rank])
        ends = [one.start + one.seconds for one in mine]
        assert all(end <= later.start + 1e-9 for end, later in zip(ends, mine[1:], strict=False))
    when = {one.operation: one.start for one in intervals}
    # The second stage's first forward begins once the first stage's output has arrived.
    assert when[Operation("forward", 1, 0)] == pytest.approx(1.0 + send)


def test_intervals_of_impossible_pipelines_are_refused() -> None:
    with pytest.raises(ValueError, match="3 stages on 2 ranks"):
        simulate_pipeline_intervals("1f1b", [WHOLE] * 3, 2, 4)


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev", "interleaved_zero_bubble"])
@pytest.mark.parametrize("send", [0.1, 0.5, 3.0])
def test_slow_links_never_leave_the_ranks_waiting_for_each_other(schedule: Schedule, send: float) -> None:
    for pp, micro_batches in ((2, 4), (4, 40)):
        played = simulate_pipeline(schedule, [SPLIT] * (2 * pp), pp, micro_batches, send)
        assert played.compute_seconds == pytest.approx([6.0 * micro_batches] * pp)
        assert played.seconds >= 6.0 * micro_batches + send


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 8), st.integers(2, 6), st.integers(1, 40))
def test_interleaved_ranks_never_wait_for_each_other_in_a_circle(
    pp: int, virtual: int, micro_batches: int
) -> None:
    played = simulate_pipeline("interleaved_1f1b", [WHOLE] * (pp * virtual), pp, micro_batches)
    work = 3 * virtual * micro_batches
    assert max(played.compute_seconds) == pytest.approx(work)
    assert played.seconds >= work + 3 * (pp - 1)
