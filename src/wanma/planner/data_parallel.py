"""What ranks that share or repeat a stage's state exchange, and how much of it computing hides.

For every kind of model: state is counted in parameters, however a forecast came to them. Pure functions,
without torch.
"""

from __future__ import annotations

from wanma.job.plan import Plan
from wanma.planner.communication import (
    Group,
    all_gather_seconds,
    all_reduce_seconds,
    reduce_scatter_seconds,
)
from wanma.planner.compute import ELEMENT_BYTES
from wanma.planner.machine import Machine
from wanma.planner.operators import Software

INTERFERENCE = 0.15
"""Of the time of communication that runs beside compute, what the compute loses: collectives occupy some of
the multiprocessors and of the memory's bandwidth (NCCL uses 16 to 24 blocks of 108 to 132)."""


class DataParallel:
    """Communication over the ranks that share or repeat a stage's state.

    Args:
        trained_share: of the parameters, those that are trained: nothing is reduced of the others.
    """

    def __init__(self, plan: Plan, machine: Machine, software: Software, trained_share: float = 1.0) -> None:
        self.plan, self.machine, self.software = plan, machine, software
        self.shards = Group(plan.shard_ranks, plan.tp)
        self.replicas = Group(plan.replicas, plan.tp * plan.shard_ranks)
        share = 0.0 if software.frozen else trained_share
        self.gradient_bytes = software.gradient_bytes * share
        """Per parameter, as it is reduced."""
        self.weight_bytes = ELEMENT_BYTES[plan.precision]
        """Per parameter, as it is gathered to be computed with."""

    def per_micro_batch(self, parameters: float, forward: float, backward: float) -> tuple[float, float]:
        """What gathering a block's sharded parameters for forward and backward, and reducing its gradients
        beside the latter, adds to these.

        The next block's are gathered while one computes; a pipeline keeps them gathered.
        """
        if self.plan.shard != "parameters" or self.shards.size == 1 or self.plan.pp > 1:
            return 0.0, 0.0
        whole = parameters / self.plan.tp
        gather = all_gather_seconds(self.machine, self.shards, whole * self.weight_bytes)
        reduce = reduce_scatter_seconds(self.machine, self.shards, whole * self.gradient_bytes)
        return exposed(gather, forward), exposed(gather + reduce, backward)

    def once_a_step(self, parameters: float) -> tuple[float, float]:
        """(reduce, gather) of a rank's parameters: gradients, and what the optimizer's shards give back.

        Of experts a rank holds its part, which fewer ranks share: as many bytes move.
        """
        whole = parameters / self.plan.tp
        gradients = whole * self.gradient_bytes
        reduce = all_reduce_seconds(self.machine, self.replicas, gradients / self.shards.size)
        if self.plan.shard == "parameters" and self.plan.pp == 1:
            return reduce, 0.0  # the rest was done block by block
        reduce += reduce_scatter_seconds(self.machine, self.shards, gradients)
        changed = 0.0 if self.software.frozen else whole * self.weight_bytes
        return reduce, all_gather_seconds(self.machine, self.shards, changed)


def exposed(communication: float, compute: float) -> float:
    """What communication beside `compute` adds to it."""
    return max(0.0, communication - compute) + INTERFERENCE * min(communication, compute)
