"""Contenders that are one job on several numbers of ranks: equal threads, and batches of weak scaling."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from dataclasses import replace

from wanma.bench.figures.scaling import BATCH, other_settings
from wanma.bench.programs.contender import Contender
from wanma.hardware.discovery.node import discover_node
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.file.loading import to_job
from wanma.job.plan.plan import MESH_DIMS
from wanma.job.sections.job import Job
from wanma.observe.units import count_text

THREADS = "cluster.threads_per_rank"


def with_equal_threads(contenders: Sequence[Contender], job_text: str) -> list[Contender]:
    """Return contenders of a job with equal threads for each rank, if they are scalings on this node.

    Otherwise fewer ranks would have more cores each, and nothing would grow. Contenders that also differ in
    other settings, such as the precision, are a scaling for each value of those, all with the same threads.
    Threads that the job or a contender sets stay, and so do contenders of which one is of no scaling.

    Args:
        job_text: text of their job file; empty: they have none.
    """
    if len(contenders) < 2 or not job_text or any(one.kind != "job" for one in contenders):
        return list(contenders)
    jobs = [to_job(tomllib.loads(job_text), one.overrides) for one in contenders]
    sections = [job.cluster for job in jobs]
    if (
        any(job.parallel.auto for job in jobs)
        or any(one.threads_per_rank is not None or one.device == "cuda" for one in sections)
        or any(one.engine != "local" or one.nodes != 1 for one in sections)
    ):
        return list(contenders)
    ranks: dict[object, set[int]] = {}
    for one, job in zip(contenders, jobs, strict=True):
        ranks.setdefault(other_settings(one.settings), set()).add(_ranks(job))
    (node,) = discover_node().nodes
    if min(map(len, ranks.values())) < 2 or (node.devices and any(one.device != "cpu" for one in sections)):
        return list(contenders)
    threads = str(equal_threads(node.cores, max(map(_ranks, jobs))))
    return [replace(one, settings={**one.settings, THREADS: threads}) for one in contenders]


def equal_threads(cores: int, max_ranks: int) -> int:
    """Return the threads of each rank with which the largest number of ranks fits on the cores."""
    return max(cores // max_ranks, 1)


def with_weak_batches(contenders: Sequence[Contender], job_text: str) -> list[Contender]:
    """Return contenders of a job whose global batch grows with their ranks.

    The batch of the job is that of the fewest ranks.

    Raises:
        WanmaError: all contenders have as many ranks; one is a command, sets the batch itself or leaves its
            layout open; or the batch cannot be the same for each rank.
    """
    ranks = {one.name: _weak_ranks(one, job_text) for one in contenders}
    fewest = min(ranks.values(), default=1)
    if len(set(ranks.values())) < 2:
        raise WanmaError(
            f"--weak: all contenders have {count_text(fewest, 'rank')}, so that nothing grows",
            "give several numbers of ranks: --over parallel.dp_replicate=1..4",
            EXIT_USAGE,
        )
    batch = to_job(tomllib.loads(job_text)).train.global_batch
    batches = {one.name: str(weak_batch(batch, fewest, ranks[one.name])) for one in contenders}
    return [replace(one, settings={**one.settings, BATCH: batches[one.name]}) for one in contenders]


def weak_batch(batch: int, batch_ranks: int, ranks: int) -> int:
    """Return the global batch of `ranks` ranks if that of `batch_ranks` is `batch`, in weak scaling.

    Raises:
        WanmaError: the batch cannot be the same for each rank.
    """
    grown, remainder = divmod(batch * ranks, batch_ranks)
    if remainder:
        multiple = batch_ranks // math.gcd(ranks, batch_ranks)
        raise WanmaError(
            f"weak scaling: {BATCH} = {batch} on {batch_ranks} ranks cannot be as large for each of "
            f"{ranks:,}",
            f"set {BATCH} to a multiple of {multiple}",
            EXIT_USAGE,
        )
    return grown


def _weak_ranks(contender: Contender, job_text: str) -> int:
    """Return the ranks of a contender, by the sizes of its mesh."""
    if contender.kind != "job":
        raise WanmaError(
            f"--weak: the contender '{contender.name}' is a command, whose batch is its own affair",
            "give a job, or a suite of jobs",
            EXIT_USAGE,
        )
    if BATCH in contender.settings:
        raise WanmaError(
            f"--weak: the contender '{contender.name}' sets {BATCH}",
            f"set {BATCH} in the job, for the fewest ranks; it then grows with the ranks",
            EXIT_USAGE,
        )
    job = to_job(tomllib.loads(job_text), contender.overrides)
    if job.parallel.auto:
        raise WanmaError(
            f"--weak: the layout of the contender '{contender.name}' is open, and so are its ranks",
            "give sizes: --over parallel.dp_replicate=1..4",
            EXIT_USAGE,
        )
    return _ranks(job)


def _ranks(job: Job) -> int:
    return math.prod(getattr(job.parallel, name) for name in MESH_DIMS)
