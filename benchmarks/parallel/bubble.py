"""Bubble of a pipeline: idle share of a step, computed from the recorded operations of its ranks.

Pure functions over recorded operations; `bubble_rank.py` records them in wanma's own run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "loss", "backward", "input_backward", "weight_backward"]
Key = tuple[str, int, int]


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
    ended: dict[Key, float] = {}
    clocks, at = [0.0] * len(step), [0] * len(step)
    while any(at[rank] < len(todo) for rank, todo in enumerate(step)):
        moved = False
        for rank, todo in enumerate(step):
            while at[rank] < len(todo):
                operation = todo[at[rank]]
                needed = _needs(operation, stages)
                if any(key not in ended for key in needed):
                    break
                begins = max([clocks[rank], *(ended[key] for key in needed)])
                clocks[rank] = ended[_key(operation)] = begins + operation.cpu_seconds
                at[rank] += 1
                moved = True
        if not moved:
            raise ValueError("the operations wait for each other")
    busy = sum(operation.cpu_seconds for rank in step for operation in rank)
    return 1.0 - busy / (len(step) * max(clocks))


def unevenness(step: Step) -> float:
    """Return the CPU seconds of the slowest rank over the ranks' mean; 1: even stages."""
    busy = [sum(operation.cpu_seconds for operation in rank) for rank in step]
    return max(busy) * len(busy) / sum(busy)


def _key(operation: Operation) -> Key:
    """Return the key under which others wait; both kinds of backward give the gradient of the input."""
    kind = "backward" if operation.kind == "input_backward" else operation.kind
    return kind, operation.stage, operation.micro_batch


def _needs(operation: Operation, stages: int) -> list[Key]:
    """Return the operations that must have ended; those of the same rank are in its order."""
    stage, number = operation.stage, operation.micro_batch
    before: Mapping[Kind, list[Key]] = {
        "forward": [("forward", stage - 1, number)] if stage > 0 else [],
        "loss": [("forward", stage, number)],
        "backward": [("backward", stage + 1, number)] if stage < stages - 1 else [("loss", stage, number)],
        "weight_backward": [("backward", stage, number)],
    }
    return before["backward" if operation.kind == "input_backward" else operation.kind]
