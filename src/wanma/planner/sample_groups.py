"""Samples that must be computed in one micro-batch, because something is defined over them."""

from __future__ import annotations

from dataclasses import dataclass

from wanma.job.errors import JobError
from wanma.job.forecast.forecast import Workload
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.models.config.dimensions import DecoderDimensions
from wanma.planner.rules.mesh import global_batches
from wanma.planner.rules.predicates import groups_are_whole
from wanma.planner.search.space import samples_together


@dataclass(frozen=True)
class Group:
    """`size` neighbouring samples of the global batch."""

    size: int
    key: str
    """Of the job, that says so."""
    what: str
    """They share it."""

    def are_whole(self, job: Job, plan: Plan) -> bool:
        """Whether every micro-batch of every rank is a multiple of the group."""
        return groups_are_whole(plan, global_batches(job), self.size)

    def refusal(self, job: Job, plan: Plan) -> JobError:
        """The error for a plan whose micro-batches are none."""
        batches = ", ".join(map(str, global_batches(job)))
        return JobError(
            f"train.global_batch = {batches} over {plan.data_ranks} data ranks does not divide into "
            f"micro-batches of whole groups: {self.key} = {self.size} samples share {self.what}",
            f"make train.global_batch a multiple of {self.size * plan.data_ranks} and parallel.micro_batch "
            f"one of {self.size}, or change {self.key}",
        )


def group_of(job: Job, dimensions: DecoderDimensions | None, workload: Workload | None = None) -> Group:
    """Of the job's model.

    Args:
        dimensions: of a decoder, where the model is one.
        workload: of a module of one's own.
    """
    size = samples_together(job, dimensions, workload)
    if dimensions is not None and dimensions.couples_samples:
        return Group(size, "model.balance_group", "the experts' balance and capacity")
    return Group(size, "model.statistics_group", "one statistic")
