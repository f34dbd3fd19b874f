"""Measurement on one rank of a `RankLaunch`: joins the other ranks, reports rounds, writes the result."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from wanma.bench.measurements.rank_launch import RESULT_FILE, ROUND_EVENT, SETUP_TIMEOUT_SECONDS
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.parallel.mesh.parallel_mesh import open_mesh


@dataclass(frozen=True)
class RankMeasurement:
    """Measurement of one rank that has joined the others."""

    worker: WorkerContext
    group: dist.ProcessGroup
    """Process group of all ranks."""
    device: torch.device

    @property
    def multiprocessors(self) -> int | None:
        """Multiprocessors of the rank's GPU; None on a CPU."""
        if self.device.type != "cuda":
            return None
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    def report_round(self, number: int) -> None:
        """Report that a round of the measurement begins."""
        self.worker.supervisor_client.report_progress(number, "measuring")
        if self.worker.rank == 0:
            self.worker.supervisor_client.send_event({"kind": ROUND_EVENT, "number": number})

    def write_result(self, content: Mapping[str, Any]) -> None:
        """Write what `measure_on_ranks` returns; only rank 0 does."""
        if self.worker.rank == 0:
            (self.worker.run_directory / RESULT_FILE).write_text(json.dumps(content))


@contextmanager
def open_rank_measurement(worker: WorkerContext, plan: Plan, seconds: float) -> Iterator[RankMeasurement]:
    """Join the other ranks; all ranks of the launch call it.

    Args:
        worker: context of this rank.
        plan: plan of the launch.
        seconds: approximate duration of the measurement.
    """
    torch.set_num_threads(plan.threads_per_rank)
    worker.supervisor_client.report_progress(0, "joining")
    with open_mesh(worker, plan, seconds + SETUP_TIMEOUT_SECONDS) as grid:
        group = dist.group.WORLD
        assert group is not None  # the mesh has joined it
        yield RankMeasurement(worker, group, grid.device)
