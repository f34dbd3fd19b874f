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
    given = [("batch_share_schedule", f"[{list(move)}]", move[1]) for move in parallel.batch_share_schedule]
    if parallel.batch_shares:
        given.insert(0, ("batch_shares", str(parallel.batch_shares), parallel.batch_shares))
    ranks = parallel.dp_replicate * parallel.dp_shard
    for name, written, shares in given:
        key = f"parallel.{name} = {written}"
        if parallel.auto:
            raise JobError(
                f"{key} with parallel = 'auto', which chooses how many ranks there are",
                f"leave parallel.{name} out, or give the sizes of the axes",
            )
        if len(shares) != ranks:
            raise JobError(
                f"{key} has {len(shares)} numbers for {count_text(ranks, 'data rank')}",
                "give one number for each data rank (dp_replicate × dp_shard), in the order of the ranks",
            )
    steps = [step for step, _ in parallel.batch_share_schedule]
    if any(later <= earlier for earlier, later in zip([0, *steps], steps, strict=False)):
        raise JobError(
            f"parallel.batch_share_schedule: the steps must rise from 1 on (given: {steps})",
            "order them; the shares of the first step are parallel.batch_shares",
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
                f"raise train.global_batch to {sum(shares)}, where each rank has as many samples as its "
                "number says, or give the smallest share more (parallel.batch_shares)",
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
            "parallel.load_balancing = 'on' with parallel.batch_share_schedule: both say when shares of the "
            "batch move",
            "leave parallel.batch_share_schedule out, or set parallel.load_balancing = 'off' to repeat a "
            "run's moves",
        )
    if parallel.load_balancing != "on":
        return
    if job.train.deterministic:
        raise JobError(
            "parallel.load_balancing = 'on' with train.deterministic: shares follow measured times, which no "
            "two runs have alike",
            "set parallel.load_balancing = 'off'; parallel.batch_share_schedule repeats the moves that a run "
            "has told",
        )
    if ranks == 1 and not parallel.auto:
        raise JobError(
            "parallel.load_balancing = 'on' with one data rank: there is nobody to give samples to",
            "set parallel.load_balancing = 'off', or dp_replicate or dp_shard to the number of replicas",
        )


def _abbreviated(shares: list[int]) -> str:
    """Return the shares as text, shortened after the first 16."""
    return str(shares) if len(shares) <= 16 else f"{str(shares[:16])[:-1]}, ...]"
