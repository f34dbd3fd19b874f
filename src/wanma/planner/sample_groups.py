"""Groups of samples that one micro-batch must hold together, because a statistic is defined over them."""

from __future__ import annotations

from dataclasses import dataclass

from wanma.job.errors import JobError
from wanma.job.forecast.forecast import Workload
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.models.config.dimensions import DecoderConfig
from wanma.planner.rules.mesh import global_batches
from wanma.planner.rules.predicates import keeps_sample_groups
from wanma.planner.search.space import coupled_samples


@dataclass(frozen=True)
class SampleGroup:
    """Group of `size` neighbouring samples of the global batch."""

    size: int
    job_key: str
    """Job key that sets the size of the group."""
    shared_quantity: str
    """Name of the quantity that the samples of a group share."""

    def is_kept_by(self, job: Job, plan: Plan) -> bool:
        """Return whether every micro-batch of every rank is a multiple of the group."""
        return keeps_sample_groups(plan, global_batches(job), self.size)

    def split_error(self, job: Job, plan: Plan) -> JobError:
        """Return the error for a plan whose micro-batches do not hold whole groups."""
        batches = ", ".join(map(str, global_batches(job)))
        return JobError(
            f"train.global_batch = {batches} over {plan.data_parallel_size} data ranks does not divide "
            f"into micro-batches of complete sample groups: {self.job_key} = {self.size} samples share "
            f"{self.shared_quantity}",
            f"set train.global_batch to a multiple of {self.size * plan.data_parallel_size} and "
            f"parallel.micro_batch to one of {self.size}, or change {self.job_key}",
        )


def sample_group_of(
    job: Job, dimensions: DecoderConfig | None, workload: Workload | None = None
) -> SampleGroup:
    """Return the sample group of the job's model.

    Args:
        dimensions: the decoder's dimensions; None for any other model.
        workload: traced workload of a user's own module.
    """
    size = coupled_samples(job, dimensions, workload)
    if dimensions is not None and dimensions.has_sample_coupling:
        return SampleGroup(size, "model.balance_group", "the expert balance and capacity")
    return SampleGroup(size, "model.batch_norm_group", "one statistic")
