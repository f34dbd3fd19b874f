"""Settings of a job on a growing number of ranks: one mesh dimension grows, and so may the batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from wanma.bench.suites.scale_table import Axis
from wanma.bench.suites.scaled_contenders import weak_batch
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.plan.plan import MESH_DIMS
from wanma.job.sections.job import Job


@dataclass(frozen=True)
class Growth:
    """Layout of a job as a function of its ranks."""

    axis: str
    """Mesh dimension that grows."""
    others: int
    """Product of the other mesh dimensions."""
    global_batch: int
    """Samples of a step on `batch_ranks` ranks."""
    batch_ranks: int
    is_weak: bool
    """True if the global batch grows with the ranks; otherwise it stays."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Overrides of the job on every number of ranks."""
    shards_axis_alone: bool = False
    """True if the job names a state that `dp_shard` shards, and no `cp` shares it."""

    def settings_of(self, ranks: int) -> dict[str, str]:
        """Return the overrides of the job on `ranks` ranks.

        Raises:
            WanmaError: the ranks are no multiple of the other dimensions, or the batch no multiple of ranks.
        """
        size, remainder = divmod(ranks, self.others)
        if remainder or not size:
            raise WanmaError(
                f"{ranks:,} ranks are no multiple of {self.others}, the product of the mesh dimensions "
                f"beside {self.axis}",
                f"measure and forecast multiples of {self.others}",
                EXIT_USAGE,
            )
        changes = {f"parallel.{self.axis}": str(size)}
        if self.axis == "dp_shard" and size == 1 and self.shards_axis_alone:
            changes["parallel.shard"] = "none"  # there is nobody to share it with
        if self.is_weak:
            changes["train.global_batch"] = str(self.batch_of(ranks))
        return {**self.settings, **changes}

    def batch_of(self, ranks: int) -> int:
        """Return the samples of a step on `ranks` ranks.

        Raises:
            WanmaError: the batch cannot be the same for each rank.
        """
        return weak_batch(self.global_batch, self.batch_ranks, ranks) if self.is_weak else self.global_batch


def default_axis(job: Job, device: str) -> Axis:
    """Return the mesh dimension that grows where nothing else is said.

    Replicas, or shards where the job shards its state; and on accelerators shards, if the job leaves its
    layout open.
    """
    parallel = job.parallel
    shards = parallel.shard not in (None, "none") or parallel.dp_shard > 1
    return "dp_shard" if shards or (parallel.auto and device == "cuda") else "dp_replicate"


def growth_of(job: Job, axis: str, *, is_weak: bool, batch_ranks: int, settings: Mapping[str, str]) -> Growth:
    """Return the growth of a job along `axis`.

    Args:
        batch_ranks: ranks on which the job's own batch is meant.
    """
    others = math.prod(getattr(job.parallel, name) for name in MESH_DIMS if name != axis)
    opened = {"parallel.auto": "false"} if job.parallel.auto else {}
    if job.parallel.auto and "recompute" not in job.parallel.model_fields_set:
        opened["parallel.recompute"] = "auto"
    return Growth(
        axis,
        others,
        job.train.global_batch,
        batch_ranks,
        is_weak,
        {**opened, **settings},
        shards_axis_alone=job.parallel.shard not in (None, "none") and job.parallel.cp == 1,
    )
