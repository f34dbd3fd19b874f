"""Groups over shared memory for tests: small chunks, so that small tensors take several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from wanma.collectives.shared_memory import backend
from wanma.collectives.shared_memory.backend import shared_group
from wanma.collectives.shared_memory.process_group import SharedGroup
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import Worker
from wanma.parallel.mesh.parallel_mesh import Grid, process_grid

CHUNK_BYTES = 1 << 14


@contextmanager
def shared_world(worker: Worker, deadline_seconds: float = 60) -> Iterator[tuple[SharedGroup, Grid]]:
    """All ranks in one group over shared memory, as a run has it; never Gloo instead."""
    backend.CHUNK_BYTES = CHUNK_BYTES
    plan = Plan(dp_replicate=worker.world_size)
    with process_grid(worker, plan, deadline_seconds, "shared_memory") as grid:
        group = shared_group(dist.group.WORLD)
        assert group is not None
        yield group, grid
