"""Rank entry point of a calibration; rank 0 writes the points."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

from wanma.bench.calibration.decoder_benchmark import decoder_cases
from wanma.bench.measurements.rank_measurement import open_rank_measurement
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.planner.calibration.microbenchmarks import run_microbenchmarks


@dataclass(frozen=True)
class CalibrationRequest:
    """Parameters of one measurement, for its ranks."""

    plan: Plan
    precisions: tuple[str, ...]
    """Precisions of products and attention."""
    seconds: float
    threads_per_core: float
    """Threads per core, as in `run_microbenchmarks`."""
    disk_folder: Path | None
    """Folder in which the disk is measured, as in `run_microbenchmarks`."""


def calibrate_worker(worker: WorkerContext, payload: bytes) -> None:
    """Run the measurement on one rank, with the others.

    Args:
        payload: a pickled `CalibrationRequest`, from the command that started this process.
    """
    request: CalibrationRequest = pickle.loads(payload)
    plan = request.plan
    with open_rank_measurement(worker, plan, request.seconds) as measurement:
        worker.supervisor_client.report_progress(0, "measuring")
        measured = run_microbenchmarks(
            measurement.group,
            measurement.device,
            request.precisions,
            request.seconds,
            request.threads_per_core,
            request.disk_folder,
            decoder_cases(worker, request.threads_per_core) if plan.device == "cpu" else (),
        )
        points = [[point.operator, point.shape, point.seconds, point.precision] for point in measured.points]
        measurement.write_result(
            {
                "points": points,
                "disturbed": measured.disturbed_points,
                "processors": measurement.multiprocessors,
            }
        )
