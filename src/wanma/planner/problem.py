"""What a search for plans is given: a model, a batch and equal machines. Pure data, without torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from wanma.job.cluster import Cluster
from wanma.job.forecast import Workload
from wanma.job.sections import Job
from wanma.models.dimensions import DecoderDimensions
from wanma.planner.machine import Machine
from wanma.planner.operators import Software


@dataclass(frozen=True)
class Problem:
    """All that a forecast needs beside the plan; what stays the same while plans vary."""

    job: Job
    """What the user fixed: batch, optimizer, precision, steps, checkpoints."""
    cluster: Cluster
    workload: Workload
    machine: Machine
    """The cluster's devices as forecasts of time see them."""
    memory_bytes: float
    """Of one device, what a plan may fill."""
    dimensions: DecoderDimensions | None = None
    """Of a decoder, where the model is one: then its operators are known one by one."""
    software: Software = field(default_factory=Software)
    """Habits of the program that trains: our own runtime's."""

    @property
    def global_batch(self) -> int:
        """Samples of a step, once the ramp is over."""
        batches = [batch for step, batch in self.job.train.batch_ramp if step < self.job.train.steps]
        return batches[-1] if batches else self.job.train.global_batch

    @property
    def sequence(self) -> int:
        """Tokens of one sample."""
        return self.workload.tokens_per_sample
