"""Bubble of a pipeline: idle share of a step, computed from the recorded operations of its ranks.

Pure functions over recorded operations; `bubble_rank.py` records them in wanma's own run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from wanma.planner.pipeline import operation as replay
from wanma.planner.pipeline.replay import TimedOperation, replay_operations

Kind = Literal["forward", "loss", "backward", "input_backward", "weight_backward"]
_REPLAYED_KINDS: Mapping[Kind, replay.OperationKind] = {
    "forward": "forward",
    "backward": "backward",
    "input_backward": "backward",
    "weight_backward": "weight gradient",
}
"""Kinds of operations as a replay has them; both kinds of backward give the gradient of the input."""


@dataclass(frozen=True)
class Operation:
    """Computation of one stage on one micro-batch."""

    kind: Kind
    stage: int
    micro_batch: int
    start: float
    """Start in seconds of the machine's monotonic clock."""
    end: float
    cpu_seconds: float
    """CPU seconds of the computing thread."""


Step = Sequence[Sequence[Operation]]
"""Operations of one step by rank, in the order of each rank."""


def measured_share(step: Step) -> float:
    """Return the idle share by the clock, between the first forward and the last backward of any rank."""
    span = max(o.end for rank in step for o in rank) - min(o.start for rank in step for o in rank)
    busy = sum(o.end - o.start for rank in step for o in rank)
    return 1.0 - busy / (len(step) * span)


def replayed_share(step: Step, stages: int) -> float:
    """Return the idle share if each rank had a core and messages took no time: same operations, same order.

    The schedule's own bubble and the stages' differences remain. An operation lasts for its CPU seconds,
    which ranks that share a core do not lengthen, unlike clock time.

    Raises:
        ValueError: the order waits for itself.
    """
    times = replay_operations([_timed(rank) for rank in step], stages)
    return 1.0 - sum(time.busy for time in times) / (len(step) * max(time.end for time in times))


def unevenness(step: Step) -> float:
    """Return the CPU seconds of the slowest rank over the ranks' mean; 1: even stages."""
    busy = [sum(operation.cpu_seconds for operation in rank) for rank in step]
    return max(busy) * len(busy) / sum(busy)


def _timed(operations: Sequence[Operation]) -> list[TimedOperation]:
    """Return the operations of a rank as a replay takes them: a loss is part of the forward before it."""
    timed: list[TimedOperation] = []
    for one in operations:
        if one.kind == "loss":
            forward, seconds = timed[-1]
            timed[-1] = TimedOperation(forward, seconds + one.cpu_seconds)
        else:
            operation = replay.Operation(_REPLAYED_KINDS[one.kind], one.stage, one.micro_batch)
            timed.append(TimedOperation(operation, one.cpu_seconds))
    return timed
