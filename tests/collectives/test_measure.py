"""Collectives measured over real processes."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
import torch.distributed as dist

from support.ranks import run_ranks
from wanma.collectives.measurement.microbenchmark import (
    TrainingCollective,
    measure_collective,
)
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext

COLLECTIVES: tuple[TrainingCollective, ...] = get_args(TrainingCollective)


def measure(worker: WorkerContext) -> tuple[dict[TrainingCollective, float], list[float]]:
    from wanma.parallel.mesh.parallel_mesh import open_mesh

    with open_mesh(worker, Plan(dp_replicate=2), 60):
        group = dist.group.WORLD
        assert group is not None
        cpu = torch.device("cpu")
        found = {name: measure_collective(name, 4099, group, cpu, 0.01) for name in COLLECTIVES}
        sizes = [measure_collective("all_reduce", size, group, cpu, 0.05) for size in (1 << 10, 1 << 24)]
    return found, sizes


def alone(worker: WorkerContext) -> str:
    from wanma.parallel.mesh.parallel_mesh import open_mesh

    with open_mesh(worker, Plan(), 60):
        group = dist.group.WORLD
        assert group is not None
        with pytest.raises(ValueError, match="takes two ranks"):
            measure_collective("all_reduce", 4096, group, torch.device("cpu"))
    return "refused"


def test_every_collective_is_timed_and_ranks_agree() -> None:
    (one, sizes), (other, _) = run_ranks(measure, 2, ())
    assert list(one) == list(COLLECTIVES)
    assert one == other
    assert all(0 < seconds < 5 for seconds in one.values())
    assert sizes[1] > sizes[0], "16 MiB take longer than a kilobyte"


def test_a_rank_alone_has_nothing_to_measure() -> None:
    assert run_ranks(alone, 1, ()) == ["refused"]
