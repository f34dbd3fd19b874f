"""Merge of measured collectives into the calibration that forecasts use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from wanma.bench.collectives.calibration_operators import calibration_operators
from wanma.bench.collectives.results import CollectiveResults
from wanma.job.errors import JobError, WanmaError
from wanma.planner.calibration.curve_fitting import refit_links
from wanma.planner.hardware_model.calibration import (
    BenchmarkPoint,
    Calibration,
    DeviceCalibration,
    load_calibration,
    save_calibration,
)


def check_calibration_writable(node_count: int) -> None:
    """Raise `JobError` if results cannot be saved, before anything is measured.

    A damaged calibration is reported too.
    """
    if node_count > 1:
        raise JobError(
            f"--save with --nodes {node_count}: a calibration holds the links of one node",
            "remove --save; describe the network between nodes in a cluster file",
        )
    load_calibration()


def save_to_calibration(results: Iterable[CollectiveResults], path: Path | None = None) -> Path:
    """Set the links of the calibration to the measurements of these sweeps.

    Args:
        path: calibration file; default: the user's.

    Returns:
        the calibration file.

    Raises:
        WanmaError: the device was not calibrated with so many ranks, so that there is nothing to add to; or
            all-reduces of fp32 by the backend are missing; or the file cannot be used.
    """
    calibration = load_calibration(path)
    merged = [_merge_into_calibration(calibration, sweep) for sweep in results]
    return save_calibration(calibration.with_devices(*merged), path)


def _merge_into_calibration(calibration: Calibration, results: CollectiveResults) -> DeviceCalibration:
    key = (results.device, results.ranks, results.threads)
    before = next((device for device in calibration.devices if device.key == key), None)
    if before is None:
        raise WanmaError(
            f"not saved: {results.device} with {results.ranks} ranks has no calibration, and bandwidths "
            "alone give no forecast",
            f"run `wanma cluster --calibrate --ranks {results.ranks}`, then measure again with --save",
        )
    points = list(_calibration_points(results))
    if not any(point.operator == "all_reduce" for point in points):
        raise WanmaError(
            "not saved: forecasts compare all collectives with the backend's all-reduces in fp32, "
            "which were not measured",
            "measure them too: remove --collectives, --algorithms and --dtypes",
        )
    fitted = refit_links(before, points)
    return replace(fitted, date=results.date)


def _calibration_points(results: CollectiveResults) -> Iterator[BenchmarkPoint]:
    for timing in results.timings:
        if timing.dtype == "fp32":
            for operator in calibration_operators(
                timing.collective, timing.algorithm, on_cpu=results.threads > 0
            ):
                yield BenchmarkPoint(operator, (timing.ranks, timing.size_bytes), timing.seconds)
