"""Bubble of a step's pipeline, from the operations of all its ranks.

A rank sees only how long it waits for other stages: for their work, and for messages. The ranks of rank 0's
pipeline therefore add the durations of their operations to the all-reduce by which a step ends anyway. A
replay without messages gives the bubble. Rank 0 waits for messages in the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from wanma.job.plan.plan import Plan
from wanma.planner.pipeline.operation import Operation, OperationKind
from wanma.planner.pipeline.replay import TimedOperation, replay_operations
from wanma.planner.pipeline.schedules import SPLIT_BACKWARD

_KINDS: tuple[OperationKind, ...] = ("forward", "backward", "weight gradient")


def exchanges_operations(plan: Plan) -> bool:
    """Return True if the ranks of a plan exchange the durations of their operations.

    Replicas of different shapes have no pipeline in common.
    """
    return plan.pp > 1 and not plan.placement


def operation_terms(
    operations: Sequence[TimedOperation], plan: Plan, rank: int, global_batch: int
) -> tuple[float, ...]:
    """Return the numbers that a rank adds to the step's all-reduce; as many on every rank.

    Each rank of rank 0's pipeline has places of its own: for each operation, in order, its number, from 1,
    and its seconds. Other ranks add zeros.

    Args:
        operations: operations of the rank in this step.
        plan: plan of the step.
        rank: the rank.
        global_batch: samples of the step.
    """
    if not exchanges_operations(plan):
        return ()
    micro_batches = plan.gradient_accumulation_steps(global_batch)
    size = _rank_size(plan, micro_batches)
    terms = [0.0] * (plan.pp * size)
    coordinates = plan.coordinates(rank)
    first = coordinates.pop("pp") * size
    if not any(coordinates.values()):
        for index, (operation, seconds) in enumerate(operations):
            kind, stage, micro_batch = operation
            number = (_KINDS.index(kind) * plan.stage_count + stage) * micro_batches + micro_batch
            terms[first + 2 * index : first + 2 * index + 2] = number + 1, seconds
    return tuple(terms)


def bubble_seconds(sums: Sequence[float], plan: Plan, global_batch: int) -> float | None:
    """Return rank 0's idle seconds if messages took no time; None: the plan has no pipeline to replay.

    Args:
        sums: sums over the ranks of `operation_terms`.
        plan: plan of the step.
        global_batch: samples of the step.
    """
    if not sums:
        return None
    micro_batches = plan.gradient_accumulation_steps(global_batch)
    size = _rank_size(plan, micro_batches)
    ranks = []
    for first in range(0, len(sums), size):
        operations = []
        for index in range(first, first + size, 2):
            if not (number := round(sums[index])):
                break
            stages, micro_batch = divmod(number - 1, micro_batches)
            kind, stage = divmod(stages, plan.stage_count)
            operations.append(TimedOperation(Operation(_KINDS[kind], stage, micro_batch), sums[index + 1]))
        ranks.append(operations)
    return replay_operations(ranks, plan.stage_count)[0].idle


def _rank_size(plan: Plan, micro_batches: int) -> int:
    """Return the number of terms of one rank: two for each operation that its schedule may have."""
    kinds = 3 if plan.schedule in SPLIT_BACKWARD else 2
    return 2 * kinds * (plan.stage_count // plan.pp) * micro_batches
