"""Groups over shared memory for tests: small chunks, so that small tensors take several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch.distributed as dist

from wanma.collectives.shared_memory import backend
from wanma.collectives.shared_memory.backend import as_shared_memory_group
from wanma.collectives.shared_memory.process_group import SharedMemoryProcessGroup
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.parallel.mesh.parallel_mesh import ParallelMesh, open_mesh

CHUNK_BYTES = 1 << 14


@contextmanager
def shared_world(
    worker: WorkerContext, deadline_seconds: float = 60
) -> Iterator[tuple[SharedMemoryProcessGroup, ParallelMesh]]:
    """All ranks in one group over shared memory, as a run has it; never Gloo instead."""
    plan = Plan(dp_replicate=worker.world_size)
    with (
        patch.object(backend, "CHUNK_BYTES", CHUNK_BYTES),
        open_mesh(worker, plan, deadline_seconds, "shared_memory") as grid,
    ):
        group = as_shared_memory_group(dist.group.WORLD)
        assert group is not None
        yield group, grid
