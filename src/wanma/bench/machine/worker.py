"""Rank entry point of the machine benchmark; rank 0 writes the times of all cases."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from wanma.bench.machine.cases import MachineCase, machine_cases
from wanma.bench.machine.request import RESULT_FILE, ROUND_EVENT, SETUP_TIMEOUT_SECONDS, MachineRequest
from wanma.job.run.worker import WorkerContext
from wanma.parallel.mesh.parallel_mesh import open_mesh
from wanma.planner.calibration.round_robin import MeasuredTime, measure_round_robin


def measure_machine_worker(worker: WorkerContext, payload: bytes) -> None:
    """Run the measurement on one rank, with the others.

    Args:
        payload: a pickled `MachineRequest`, from the command that started this process.
    """
    request: MachineRequest = pickle.loads(payload)
    client = worker.supervisor_client

    def report_round(number: int) -> None:
        client.report_progress(number, "measuring")
        if worker.rank == 0:
            client.send_event({"kind": ROUND_EVENT, "number": number})

    torch.set_num_threads(request.plan.threads_per_rank)
    client.report_progress(0, "joining")
    with open_mesh(worker, request.plan, request.seconds + SETUP_TIMEOUT_SECONDS) as mesh:
        group = dist.group.WORLD
        assert group is not None  # the mesh has joined it
        cases = machine_cases(worker, group, mesh.device, request)
        times = measure_round_robin(
            cases, request.seconds, group, node_count=request.node_count, report_progress=report_round
        )
        if worker.rank == 0:
            processors = 0
            if mesh.device.type == "cuda":
                processors = int(torch.cuda.get_device_properties(mesh.device).multi_processor_count)
            content = times_content(cases, times, dist.get_backend(group), processors)
            (worker.run_directory / RESULT_FILE).write_text(json.dumps(content))


def times_content(
    cases: Sequence[MachineCase], times: Sequence[MeasuredTime], backend: str, processors: int
) -> dict[str, Any]:
    """Return what rank 0 writes, as `figures.execution_figures` reads it.

    Args:
        backend: backend of the messages between ranks.
        processors: multiprocessors of a GPU; 0 on a CPU.
    """
    return {
        "backend": backend,
        "processors": processors,
        "cases": [
            {"name": case.name, "ranks": case.ranks, **asdict(time)}
            for case, time in zip(cases, times, strict=True)
        ],
    }
