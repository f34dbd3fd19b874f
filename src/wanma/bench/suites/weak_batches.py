"""Global batches of weak scaling: as many samples for each rank as on the fewest."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from dataclasses import replace

from wanma.bench.programs.contender import Contender
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.file.loading import to_job
from wanma.job.plan.plan import MESH_DIMS
from wanma.observe.units import count_text

BATCH = "train.global_batch"


def with_weak_batches(contenders: Sequence[Contender], job_text: str) -> list[Contender]:
    """Return contenders of a job whose global batch grows with their ranks.

    The batch of the job is that of the fewest ranks.

    Args:
        contenders: contenders, all of kind job.
        job_text: text of their job file.

    Raises:
        WanmaError: all contenders have as many ranks; one is a command, sets the batch itself or leaves its
            layout open; or the batch cannot be the same for each rank.
    """
    ranks = {one.name: _ranks(one, job_text) for one in contenders}
    fewest = min(ranks.values(), default=1)
    if len(set(ranks.values())) < 2:
        raise WanmaError(
            f"--weak: all contenders have {count_text(fewest, 'rank')}, so that nothing grows",
            "give several numbers of ranks: --over parallel.dp_replicate=1..4",
            EXIT_USAGE,
        )
    batch = to_job(tomllib.loads(job_text)).train.global_batch
    found = []
    for one in contenders:
        grown, remainder = divmod(batch * ranks[one.name], fewest)
        if remainder:
            raise WanmaError(
                f"--weak: {BATCH} = {batch} on {fewest} ranks cannot be as large for each of "
                f"{ranks[one.name]}",
                f"set {BATCH} in the job to a multiple of {fewest}",
                EXIT_USAGE,
            )
        found.append(replace(one, settings={**one.settings, BATCH: str(grown)}))
    return found


def _ranks(contender: Contender, job_text: str) -> int:
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
    parallel = to_job(tomllib.loads(job_text), contender.overrides).parallel
    if parallel.auto:
        raise WanmaError(
            f"--weak: the layout of the contender '{contender.name}' is open, and so are its ranks",
            "give sizes: --over parallel.dp_replicate=1..4",
            EXIT_USAGE,
        )
    return math.prod(getattr(parallel, name) for name in MESH_DIMS)
