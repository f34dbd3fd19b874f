"""Pipeline of one replica whose stages are on nodes of different kinds, and its simulated time under 1F1B.

Pure functions, without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class StageTime(NamedTuple):
    """Cost of one micro-batch in one stage, or in one layer of it."""

    forward: float
    backward: float
    seconds_by_kind: dict[str, float]
    """Seconds by kind, named as in `StepTime`."""
    parameters: float
    """Number of parameters, before `tp`."""

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class ReplicaPipeline:
    """Pipeline of one replica: costs of its stages and sends."""

    stages: tuple[StageTime, ...]
    send_seconds: tuple[float, ...]
    """Seconds from the end of each stage but the last to the start of the next, and back."""

    @cached_property
    def slowest_stage_seconds(self) -> float:
        """Seconds of a micro-batch in the slowest stage."""
        return max(stage.seconds for stage in self.stages)


def replica_pipeline_seconds(pipeline: ReplicaPipeline, micro_batches: int) -> float:
    """Return the seconds of a replica's pipeline under 1F1B, from its first forward to its last backward.

    It equals `simulate_pipeline`, with a send time of its own for each stage boundary.
    """
    stages = len(pipeline.stages)
    if stages == 1:
        return micro_batches * pipeline.stages[0].seconds
    if micro_batches <= _SIMULATED_ROUNDS * stages:
        return _simulate_1f1b(pipeline, micro_batches)
    rounds = (micro_batches - (_SIMULATED_ROUNDS - 2) * stages) // stages
    start = micro_batches - rounds * stages
    shorter, longer = _simulate_1f1b(pipeline, start), _simulate_1f1b(pipeline, start + stages)
    return shorter + rounds * max(longer - shorter, stages * pipeline.slowest_stage_seconds)


_SIMULATED_ROUNDS = 6
"""Rounds of as many micro-batches as stages, after which 1F1B repeats itself."""


def _simulate_1f1b(pipeline: ReplicaPipeline, micro_batches: int) -> float:
    """Return the simulated seconds of 1F1B, with every operation run once, diagonal by diagonal.

    In turn `number`, stage `s` runs the forward of micro-batch `number` and then the backward of `number` −
    (stages − 1 − s), as 1F1B orders them.
    """
    sends, stages = pipeline.send_seconds, len(pipeline.stages)
    last = stages - 1
    forward = [stage.forward for stage in pipeline.stages]
    backward = [stage.backward for stage in pipeline.stages]
    clocks = [0.0] * stages
    arrivals = [0.0] * stages  # of the input of each stage's next backward
    for number in range(micro_batches + last):
        ready = 0.0
        if number < micro_batches:
            for stage in range(stages):
                clocks[stage] = ready = max(ready, clocks[stage]) + forward[stage]
                if stage < last:
                    ready += sends[stage]
        sent = []
        for stage in range(max(last - number, 0), stages):
            if number - last + stage >= micro_batches:
                break
            begin = max(clocks[stage], arrivals[stage]) if stage < last else clocks[stage]
            clocks[stage] = begin + backward[stage]
            if stage:
                sent.append((stage - 1, clocks[stage] + sends[stage - 1]))
        for stage, arrival in sent:
            arrivals[stage] = arrival
    return max(clocks)
