"""Exchange of the operations of a pipeline: what all ranks add up gives rank 0 the bubble of its pipeline."""

from __future__ import annotations

import pytest

from wanma.job.plan.plan import Plan
from wanma.parallel.pipeline.bubble_exchange import bubble_seconds, operation_terms
from wanma.planner.pipeline.operation import Operation
from wanma.planner.pipeline.replay import TimedOperation
from wanma.planner.pipeline.static_simulation import PipelineShape, operation_orders

GLOBAL_BATCH = 8


def operations_of(plan: Plan, pp_rank: int, seconds: float) -> list[TimedOperation]:
    size = PipelineShape(plan.pp, plan.stage_count, plan.gradient_accumulation_steps(GLOBAL_BATCH))
    order = operation_orders(plan.schedule, size)[pp_rank]
    return [TimedOperation(size.operation(number), seconds) for number in order]


def exchanged(plan: Plan, seconds_by_pp_rank: list[float], others: float = 9.0) -> list[float]:
    """Sums over all ranks; those of other pipelines than rank 0's take `others` seconds for an operation."""
    terms = []
    for rank in range(plan.world_size):
        coordinates = plan.coordinates(rank)
        pp_rank = coordinates.pop("pp")
        seconds = others if any(coordinates.values()) else seconds_by_pp_rank[pp_rank]
        terms.append(operation_terms(operations_of(plan, pp_rank, seconds), plan, rank, GLOBAL_BATCH))
    return [sum(column) for column in zip(*terms, strict=True)]


@pytest.mark.parametrize(
    "plan",
    [
        Plan(pp=2, micro_batch=1),
        Plan(pp=4, micro_batch=1),
        Plan(pp=2, dp_replicate=2, micro_batch=1),
        Plan(pp=2, tp=2, micro_batch=2),
    ],
    ids=str,
)
def test_the_bubble_of_even_stages_is_that_of_the_theory(plan: Plan) -> None:
    bubble = bubble_seconds(exchanged(plan, [0.5] * plan.pp), plan, GLOBAL_BATCH)
    assert bubble == pytest.approx(2 * 0.5 * (plan.pp - 1))


def test_interleaved_stages_keep_their_names() -> None:
    plan = Plan(pp=2, micro_batch=1, schedule="interleaved_1f1b", virtual_stages=2)
    bubble = bubble_seconds(exchanged(plan, [0.5, 0.5]), plan, GLOBAL_BATCH)
    assert bubble == pytest.approx(2 * 0.5 * (plan.pp - 1))


def test_a_backward_may_be_whole_or_split() -> None:
    plan = Plan(pp=2, micro_batch=8, schedule="interleaved_zero_bubble", virtual_stages=2)
    first = [Operation("forward", 0, 0), Operation("forward", 2, 0), Operation("backward", 2, 0)]
    first += [Operation("weight gradient", 2, 0), Operation("backward", 0, 0)]
    second = [Operation("forward", 1, 0), Operation("forward", 3, 0), Operation("backward", 3, 0)]
    second += [Operation("backward", 1, 0), Operation("weight gradient", 1, 0)]
    sums = [
        sum(terms)
        for terms in zip(
            *(
                operation_terms([TimedOperation(one, 1.0) for one in own], plan, rank, GLOBAL_BATCH)
                for rank, own in enumerate((first, second))
            ),
            strict=True,
        )
    ]
    # Forwards of stages 0 to 3, backwards 3 to 0: eight seconds, of which five are the first rank's.
    assert bubble_seconds(sums, plan, GLOBAL_BATCH) == pytest.approx(3.0)


def test_a_single_stage_exchanges_nothing() -> None:
    plan = Plan(dp_replicate=2)
    assert operation_terms([], plan, 0, GLOBAL_BATCH) == ()
    assert bubble_seconds([], plan, GLOBAL_BATCH) is None
