"""Validation of uneven shares of the batch against the job and the plan.

The rules run before anything starts; each error names the keys, the cause and the way out.
"""

from __future__ import annotations

from wanma.data.sampling.batch_size_schedule import global_batch_size
from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.observe.units import count_text
from wanma.planner.rules.mesh import check_micro_batches
from wanma.planner.sample_groups import SampleGroup


def check_job_shares(job: Job) -> None:
    """Check a job's `batch_shares` and `batch_share_schedule` against its data-parallel sizes and balancing.

    Raises:
        JobError: names the keys.
    """
    parallel = job.parallel
    settings = [
        ("batch_share_schedule", f"[{list(move)}]", move[1]) for move in parallel.batch_share_schedule
    ]
    if parallel.batch_shares:
        settings.insert(0, ("batch_shares", str(parallel.batch_shares), parallel.batch_shares))
    ranks = parallel.dp_replicate * parallel.dp_shard
    for name, written, shares in settings:
        key = f"parallel.{name} = {written}"
        if parallel.auto:
            raise JobError(
                f"{key} with parallel = 'auto': the number of data ranks is not set",
                f"unset parallel.{name}, or set the sizes of the mesh dimensions",
            )
        if len(shares) != ranks:
            raise JobError(
                f"{key} has {len(shares)} numbers for {count_text(ranks, 'data rank')}",
                "give one number for each data rank (dp_replicate × dp_shard), in rank order",
            )
    steps = [step for step, _ in parallel.batch_share_schedule]
    if any(later <= earlier for earlier, later in zip([0, *steps], steps, strict=False)):
        raise JobError(
            f"parallel.batch_share_schedule: the steps must increase, from 1 on (given: {steps})",
            "sort the steps; parallel.batch_shares holds the shares of the first step",
        )
    _check_balance(job, ranks)


def check_plan_shares(job: Job, plan: Plan, group: SampleGroup) -> None:
    """Check the shares of a plan, and those that the job moves to, against every global batch they apply to.

    Raises:
        JobError: a data rank would get no sample, or a pipeline or a group of samples could not be run.
    """
    for step, shares in [(0, list(plan.batch_shares)), *job.parallel.batch_share_schedule]:
        if shares:
            _check_shares_from_step(job, plan.with_changes(batch_shares=tuple(shares)), group, step)


def invalid_shares_reason(
    job: Job, plan: Plan, shares: tuple[int, ...], group_size: int, step: int
) -> str | None:
    """Return the reason why a run cannot continue with `shares` from step `step` on, or None.

    Args:
        group_size: samples that must be computed in one micro-batch.
    """
    try:
        _check_shares_from_step(
            job,
            plan.with_changes(batch_shares=shares),
            SampleGroup(group_size, "the group", "a statistic"),
            step,
        )
    except JobError as error:
        return error.message
    return None


def _check_shares_from_step(job: Job, plan: Plan, group: SampleGroup, step: int) -> None:
    shares = list(plan.batch_shares)
    for batch in _batches_from(job, step):
        sizes = plan.rows_per_data_rank(batch)
        if 0 in sizes:
            rank = sizes.index(0)
            raise JobError(
                f"shares {_abbreviated(shares)} of train.global_batch = {batch} give data rank {rank} no "
                "sample: "
                f"its share is {shares[rank]} of {sum(shares)}",
                f"raise train.global_batch to {sum(shares)}, where each rank gets as many samples as "
                "its share says, or raise the smallest share (parallel.batch_shares)",
            )
    if group.size > 1 and not group.is_kept_by(job, plan):
        raise group.split_error(job, plan)
    check_micro_batches(job, plan)


def _batches_from(job: Job, step: int) -> list[int]:
    """Return the distinct global batch sizes of the steps from `step` on, in samples, in rising order."""
    later = [first for first, _ in job.train.batch_ramp if step < first < job.train.steps]
    return sorted({global_batch_size(job.train, first) for first in (step, *later)})


def _check_balance(job: Job, ranks: int) -> None:
    parallel = job.parallel
    if parallel.load_balancing == "on" and parallel.batch_share_schedule:
        raise JobError(
            "parallel.load_balancing = 'on' with parallel.batch_share_schedule: both change the batch shares",
            "unset parallel.batch_share_schedule, or set parallel.load_balancing = 'off' to repeat the "
            "changes of an earlier run",
        )
    if parallel.load_balancing != "on":
        return
    if job.train.deterministic:
        raise JobError(
            "parallel.load_balancing = 'on' with train.deterministic: batch shares follow measured "
            "times, which differ between runs",
            "set parallel.load_balancing = 'off'; parallel.batch_share_schedule repeats the changes "
            "that a run has reported",
        )
    if ranks == 1 and not parallel.auto:
        raise JobError(
            "parallel.load_balancing = 'on' with one data rank: no other rank can take samples",
            "set parallel.load_balancing = 'off', or set dp_replicate or dp_shard to the number of replicas",
        )


def _abbreviated(shares: list[int]) -> str:
    """Return the shares as text, shortened after the first 16."""
    return str(shares) if len(shares) <= 16 else f"{str(shares[:16])[:-1]}, ...]"
