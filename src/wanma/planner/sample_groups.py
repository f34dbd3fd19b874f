"""Groups of samples that one micro-batch must hold together, because a statistic is defined over them."""

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
    """Group of `size` neighbouring samples of the global batch."""

    size: int
    key: str
    """Job key that sets the size of the group."""
    what: str
    """Name of the quantity that the samples of a group share."""

    def are_whole(self, job: Job, plan: Plan) -> bool:
        """Return whether every micro-batch of every rank is a multiple of the group."""
        return groups_are_whole(plan, global_batches(job), self.size)

    def refusal(self, job: Job, plan: Plan) -> JobError:
        """Return the error for a plan whose micro-batches do not hold whole groups."""
        batches = ", ".join(map(str, global_batches(job)))
        return JobError(
            f"train.global_batch = {batches} over {plan.data_ranks} data ranks does not divide into "
            f"micro-batches of whole groups: {self.key} = {self.size} samples share {self.what}",
            f"make train.global_batch a multiple of {self.size * plan.data_ranks} and parallel.micro_batch "
            f"one of {self.size}, or change {self.key}",
        )


def group_of(job: Job, dimensions: DecoderDimensions | None, workload: Workload | None = None) -> Group:
    """Return the sample group of the job's model.

    Args:
        dimensions: the decoder's dimensions; None for any other model.
        workload: traced workload of a user's own module.
    """
    size = samples_together(job, dimensions, workload)
    if dimensions is not None and dimensions.couples_samples:
        return Group(size, "model.balance_group", "the experts' balance and capacity")
    return Group(size, "model.batch_norm_group", "one statistic")
