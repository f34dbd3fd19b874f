"""Rank entry point of the machine benchmark; rank 0 writes the times of all cases."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from wanma.bench.machine.cases import MachineCase, machine_cases
from wanma.bench.machine.collective_selection import CollectiveSelection
from wanma.bench.machine_figures.case_names import Part
from wanma.bench.measurements.rank_measurement import open_rank_measurement
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.planner.calibration.round_robin import MeasuredTime, measure_round_robin


@dataclass(frozen=True)
class MachineRequest:
    """Parameters of one execution, for its ranks."""

    plan: Plan
    seconds: float
    threads_per_core: float
    folder: Path
    """Folder of the file system to measure."""
    parts: tuple[Part, ...]
    node_count: int
    selection: CollectiveSelection


def measure_machine_worker(worker: WorkerContext, payload: bytes) -> None:
    """Run the measurement on one rank, with the others.

    Args:
        payload: a pickled `MachineRequest`, from the command that started this process.
    """
    request: MachineRequest = pickle.loads(payload)
    with open_rank_measurement(worker, request.plan, request.seconds) as measurement:
        cases = machine_cases(
            worker,
            measurement.group,
            measurement.device,
            request.parts,
            request.threads_per_core,
            request.folder,
            request.node_count,
            request.selection,
        )
        times = measure_round_robin(
            cases,
            request.seconds,
            measurement.group,
            node_count=request.node_count,
            report_progress=measurement.report_round,
        )
        backend = dist.get_backend(measurement.group)
        measurement.write_result(times_content(cases, times, backend, measurement.multiprocessors or 0))


def times_content(
    cases: Sequence[MachineCase], times: Sequence[MeasuredTime], backend: str, processors: int
) -> dict[str, Any]:
    """Return what rank 0 writes, as `figures.execution_figures` reads it.

    Args:
        cases: the cases.
        times: their times.
        backend: backend of the messages between ranks.
        processors: multiprocessors of a GPU; 0 on a CPU.
    """
    return {
        "backend": backend,
        "processors": processors,
        "cases": [
            {
                "name": case.name,
                "seconds": time.seconds,
                "seconds_by_rank": time.seconds_by_rank,
                "ranks": case.ranks,
                "is_disturbed": time.is_disturbed,
            }
            for case, time in zip(cases, times, strict=True)
        ],
    }
