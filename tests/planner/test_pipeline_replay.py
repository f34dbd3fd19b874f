"""Replay of a pipeline's operations: the bubble of the theory, of uneven stages, and of split backward."""

from __future__ import annotations

import pytest
from benchmarks.parallel.bubble_runs import bubble_fraction

from wanma.planner.pipeline.operation import Operation, OperationKind
from wanma.planner.pipeline.replay import TimedOperation, replay_operations
from wanma.planner.pipeline.static_simulation import PipelineShape, operation_orders


def one_forward_one_backward(
    pp: int, micro_batches: int, seconds: dict[int, tuple[float, float]]
) -> list[list[TimedOperation]]:
    """Operations of 1F1B whose stages take (forward, backward) seconds."""
    size = PipelineShape(pp, pp, micro_batches)
    ranks = []
    for order in operation_orders("1f1b", size):
        operations = [size.operation(number) for number in order]
        ranks.append(
            [
                TimedOperation(operation, seconds[operation.stage][operation.kind == "backward"])
                for operation in operations
            ]
        )
    return ranks


@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 2), (2, 8), (4, 4), (4, 16)])
def test_even_stages_idle_as_the_theory_says(pp: int, micro_batches: int) -> None:
    ranks = one_forward_one_backward(pp, micro_batches, dict.fromkeys(range(pp), (1.0, 2.0)))
    for time in replay_operations(ranks, pp)[:1]:
        assert time.busy == 3 * micro_batches
        assert time.idle == 3 * (pp - 1)
        assert time.idle / time.end == pytest.approx(bubble_fraction("1f1b", pp, 1, micro_batches))


def test_a_rank_waits_for_a_slower_stage_in_every_micro_batch() -> None:
    ranks = one_forward_one_backward(2, 8, {0: (1.0, 1.0), 1: (2.0, 2.0)})
    first, second = replay_operations(ranks, 2)
    assert (second.busy, second.idle) == (32.0, 1.0)
    assert first.busy == 16.0
    assert first.end == 1 + 32 + 1


def test_weight_gradients_fill_the_bubble() -> None:
    def rank(stage: int, *kinds: OperationKind) -> list[TimedOperation]:
        return [TimedOperation(Operation(kind, stage, 0), 1.0) for kind in kinds]

    ranks = [
        rank(0, "forward", "backward", "weight gradient"),
        rank(1, "forward", "backward", "weight gradient"),
    ]
    assert [time.end for time in replay_operations(ranks, 2)] == [5.0, 4.0]


def test_operations_that_wait_for_each_other_are_refused() -> None:
    backward_first = [Operation("backward", 0, 0), Operation("forward", 0, 0)]
    with pytest.raises(ValueError, match="wait for each other"):
        replay_operations([[TimedOperation(operation, 1.0) for operation in backward_first]], 1)
