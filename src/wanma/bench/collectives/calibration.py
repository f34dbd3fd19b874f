"""Merge of measured collectives into the calibration that forecasts use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from wanma.bench.collectives.calibration_operators import operators_of
from wanma.bench.collectives.results import Sweep
from wanma.job.errors import JobError, WanmaError
from wanma.planner.calibration.curve_fitting import with_collectives
from wanma.planner.hardware_model.calibration import (
    Calibration,
    Measured,
    Point,
    load_calibration,
    save_calibration,
)


def check_saving(nodes: int) -> None:
    """Raise `JobError` if results cannot be saved, before anything is measured.

    A damaged calibration is reported too.
    """
    if nodes > 1:
        raise JobError(
            f"--save with --nodes {nodes}: a calibration is of one machine's own links",
            "leave --save out; the network between machines is described in a cluster file",
        )
    load_calibration()


def save_sweeps(sweeps: Iterable[Sweep], path: Path | None = None) -> Path:
    """Set the links of the calibration to the measurements of these sweeps.

    Args:
        path: calibration file; default: the user's.

    Returns:
        the calibration file.

    Raises:
        WanmaError: the device was not calibrated with so many ranks, so that there is nothing to add to; or
            all-reduces of fp32 by the backend are missing; or the file cannot be used.
    """
    kept = load_calibration(path)
    merged = [_merged(kept, sweep) for sweep in sweeps]
    return save_calibration(kept.with_measured(*merged), path)


def _merged(kept: Calibration, sweep: Sweep) -> Measured:
    key = (sweep.device, sweep.ranks, sweep.threads)
    before = next((one for one in kept.measured if one.key == key), None)
    if before is None:
        raise WanmaError(
            f"nothing was kept: {sweep.device} with {sweep.ranks} ranks was not calibrated, and links alone "
            "make no forecast",
            f"first `wanma cluster --calibrate --ranks {sweep.ranks}`, then measure again with --save",
        )
    points = list(_points(sweep))
    if not any(point.operator == "all_reduce" for point in points):
        raise WanmaError(
            "nothing was kept: forecasts compare all collectives with the backend's all-reduces in fp32, "
            "which were not measured",
            "measure them too: leave --collectives, --algorithms and --dtypes out",
        )
    fitted = with_collectives(before, points)
    return replace(fitted, date=sweep.date)


def _points(sweep: Sweep) -> Iterator[Point]:
    for one in sweep.timings:
        if one.dtype == "fp32":
            for operator in operators_of(one.collective, one.algorithm, on_cpu=sweep.threads > 0):
                yield Point(operator, (one.ranks, one.size_bytes), one.seconds)
