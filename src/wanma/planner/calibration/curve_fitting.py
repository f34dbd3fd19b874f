"""Fit of hardware models to benchmark points: a few numbers for many times.

Each curve is fitted with the very formula that uses it (`operator_time`, `collective_time`), so that effects
outside the formula are spread over its numbers. Errors count as ratios: a small operator weighs as much as a
large one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TypeVar

from wanma.job.errors import WanmaError
from wanma.planner.calibration.framework_benchmarks import fit_framework_overhead
from wanma.planner.calibration.host_benchmarks import fit_host_model
from wanma.planner.hardware_model.calibration import BenchmarkKind, BenchmarkPoint
from wanma.planner.hardware_model.collective_time import (
    RankGroup,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    reduce_scatter_seconds,
    send_seconds,
)
from wanma.planner.hardware_model.model import (
    AttentionCurve,
    DeviceModel,
    HardwareModel,
    LinkLevel,
    MatmulCurve,
)
from wanma.planner.hardware_model.operator_time import attention_seconds, matmul_seconds

TILE_OVERHEAD_GRID = (
    0.0,
    8.0,
    16.0,
    32.0,
    64.0,
    96.0,
    128.0,
    192.0,
    256.0,
    384.0,
    512.0,
    768.0,
    1024.0,
    1536.0,
    2560.0,
)
SHARE_GRID = tuple(0.01 * percent for percent in range(2, 101))
LATENCY_GRID = tuple(1e-6 * 10 ** (step / 6) for step in range(25))
HALF_RATE_GRID = (0.0, 1e3, 1e4, 1e5, 3e5, 1e6, 3e6, 1e7, 3e7)
"""Values among which the best numbers of a curve are searched."""

CPU_TILES = ((16, 16, 1.0),)
"""Tiles of a CPU: its libraries pad to the width of a vector register, and lose next to nothing."""

_T = TypeVar("_T")


def fit_hardware_model(
    name: str,
    points: Sequence[BenchmarkPoint],
    ranks: int,
    *,
    multiprocessors: int | None,
    catalogue_device: DeviceModel | None = None,
    threads_per_core: float = 1.0,
) -> HardwareModel:
    """Return the hardware model that forecasts `points` best.

    Args:
        name: name of the device.
        ranks: number of ranks that measured together.
        multiprocessors: multiprocessors of an accelerator; None: a CPU.
        catalogue_device: the device's peaks and bandwidth, with curves for what was not measured. None: its
            peak is the best measured rate.
        threads_per_core: threads of all ranks per core, as in `HardwareModel.shared`.

    Raises:
        WanmaError: there are no products, streams or dispatch among the points.
    """
    if missing := {"product", "stream", "dispatch"} - {point.operator for point in points}:
        raise WanmaError(
            f"the measurements of {name} lack {' and '.join(sorted(missing))}",
            "measure again, with a higher --seconds",
        )
    plain = DeviceModel(name, {}, 1.0, 1, {}, AttentionCurve(1.0, 0.0, 1.0), sustained=1.0)
    # Seconds of measuring do not show the clock under hours of load: `sustained` stays as it was.
    chip = replace(catalogue_device or plain, name=name, sustained=1.0)
    dispatch = median(point.seconds / point.shape[0] for point in points if point.operator == "dispatch")
    if multiprocessors is None:
        # A kernel runs in the thread that launches it: its dispatch precedes it, and overlaps with nothing.
        chip = replace(chip, tiles=CPU_TILES, multiprocessors=1, launch_seconds=dispatch)
    else:
        chip = replace(chip, multiprocessors=multiprocessors)
    is_peak_known = catalogue_device is not None
    chip = _with_bandwidth(chip, points, is_peak_known)
    chip = _with_attention_curves(_with_matmul_curves(chip, points, is_peak_known), points)
    machine = HardwareModel(
        replace(chip, sustained=catalogue_device.sustained if catalogue_device is not None else 1.0),
        (LinkLevel(ranks, 0.0, 1.0),),
        dispatch_seconds=0.0 if multiprocessors is None else dispatch,
        start_seconds=0.0,
        shared=threads_per_core,
        host=fit_host_model(points),
    )
    if ranks > 1:
        machine = _with_links(machine, points, ranks)
    return replace(machine, program=fit_framework_overhead(machine, points))


def _with_bandwidth(chip: DeviceModel, points: Sequence[BenchmarkPoint], is_peak_known: bool) -> DeviceModel:
    """Return `chip` with the memory rate of streams that take longer than their launch."""
    streams = [point for point in points if point.operator == "stream"]
    rates = [
        point.shape[0] / (point.seconds - chip.launch_seconds)
        for point in streams
        if point.seconds > 2 * chip.launch_seconds
    ]
    if not rates:
        raise WanmaError(
            f"{chip.name}: no memory-stream benchmark took longer than its launch",
            "measure again on an idle device",
        )
    if not is_peak_known:
        return replace(chip, bandwidth_bytes_per_second=median(rates), bandwidth_share=1.0)
    # The longest stream counts: shorter ones stay in a cache.
    return replace(chip, bandwidth_share=min(rates[-1] / chip.bandwidth_bytes_per_second, 1.0))


def _with_matmul_curves(
    chip: DeviceModel, points: Sequence[BenchmarkPoint], is_peak_known: bool
) -> DeviceModel:
    """Return `chip` with a curve for every measured precision; the others keep theirs."""
    for name, own_points in _by_precision(points, "product"):
        peaks = dict(chip.peak_flops_per_second)
        if not is_peak_known:
            peaks[name] = max(2.0 * math.prod(point.shape) / point.seconds for point in own_points)
        elif name not in peaks:
            continue  # no share can be stated without a peak
        chip = replace(chip, peak_flops_per_second=peaks)

        def with_curve(share: float, fill: float, chip: DeviceModel = chip, name: str = name) -> DeviceModel:
            return replace(chip, products={**chip.products, name: MatmulCurve(share, fill)})

        def seconds(tried: DeviceModel, point: BenchmarkPoint, name: str = name) -> float:
            m, n, k = point.shape
            return matmul_seconds(tried, m, n, k, name)

        chip = _best_fit(
            itertools.starmap(with_curve, itertools.product(SHARE_GRID, TILE_OVERHEAD_GRID)),
            seconds,
            own_points,
        )
    return chip


def _with_attention_curves(chip: DeviceModel, points: Sequence[BenchmarkPoint]) -> DeviceModel:
    """Return `chip` with an attention curve for every measured precision."""
    for name, forward in _by_precision(points, "attention"):
        if name not in chip.products:
            continue
        ((_, backward),) = (pair for pair in _by_precision(points, "attention_backward") if pair[0] == name)

        def with_curve(curve: AttentionCurve, chip: DeviceModel = chip, name: str = name) -> DeviceModel:
            return replace(chip, attention_in={**chip.attention_in, name: curve})

        def seconds(tried: DeviceModel, point: BenchmarkPoint, name: str = name) -> float:
            sequences, length, heads, width = point.shape
            is_backward = point.operator == "attention_backward"
            return attention_seconds(
                tried, sequences, length, length, heads, width, backward=is_backward, precision=name
            )

        curves = (
            AttentionCurve(share, fill, 1.0)
            for share, fill in itertools.product(SHARE_GRID, TILE_OVERHEAD_GRID)
        )
        chip = _best_fit(map(with_curve, curves), seconds, forward)
        attention = chip.attention_in[name]
        tries = (with_curve(replace(attention, backward=0.02 * step), chip) for step in range(1, 101))
        chip = _best_fit(tries, seconds, backward)
    return chip


def _with_links(hardware: HardwareModel, points: Sequence[BenchmarkPoint], ranks: int) -> HardwareModel:
    """Return `hardware` with one link level that joins the ranks.

    It is fitted to all-reduces; the other collectives get factors relative to it.
    """
    by_name = {
        name: [point for point in points if point.operator == name and point.shape[0] == ranks]
        for name in _COLLECTIVES
    }
    if not by_name["all_reduce"]:
        raise WanmaError(f"the measurements of {hardware.chip.name} lack all_reduce", "measure again")
    base = _fit_link(hardware, by_name.pop("all_reduce"), ranks, HALF_RATE_GRID)
    factors = {}
    for name, own_points in by_name.items():
        if own_points:
            fitted = _fit_link(hardware, own_points, ranks, (base.ramp_bytes,))
            latency = fitted.latency_seconds / base.latency_seconds
            factors[name] = latency, base.bandwidth_bytes_per_second / fitted.bandwidth_bytes_per_second
    return replace(hardware, links=(base,), collective_factors=factors)


def _fit_link(
    hardware: HardwareModel, points: Sequence[BenchmarkPoint], ranks: int, half_rate_grid: Iterable[float]
) -> LinkLevel:
    """Return the link level that forecasts the times of these collectives best."""
    fastest = max(point.shape[1] / point.seconds for point in points)
    rates = [fastest * 2 ** (step / 4) for step in range(-4, 17)]
    grid = itertools.product(LATENCY_GRID, rates, half_rate_grid)
    tries = (replace(hardware, links=(LinkLevel(ranks, *numbers),)) for numbers in grid)
    return _best_fit(tries, _collective_seconds, points).links[0]


def forecast_collective_seconds(
    hardware: HardwareModel, operator: BenchmarkKind, ranks: int, size_bytes: float
) -> float:
    """Return the forecast seconds of a collective.

    Args:
        operator: collective, a `collectives.measurement.microbenchmark.TrainingCollective`.
    """
    return _COLLECTIVES[operator](hardware, RankGroup(ranks), size_bytes)


def _collective_seconds(hardware: HardwareModel, point: BenchmarkPoint) -> float:
    return forecast_collective_seconds(hardware, point.operator, *point.shape)


_COLLECTIVES: dict[str, Callable[[HardwareModel, RankGroup, float], float]] = {
    "all_reduce": all_reduce_seconds,
    "all_gather": all_gather_seconds,
    "reduce_scatter": reduce_scatter_seconds,
    "tensor_gather": partial(all_gather_seconds, collective="tensor_gather"),
    "tensor_scatter": partial(reduce_scatter_seconds, collective="tensor_scatter"),
    "all_to_all": all_to_all_seconds,
    "send": lambda machine, _, size: send_seconds(machine, 1, size),
}


def _by_precision(points: Sequence[BenchmarkPoint], operator: str) -> list[tuple[str, list[BenchmarkPoint]]]:
    """Return the points of one operator, grouped by precision."""
    selected = [point for point in points if point.operator == operator]
    names = dict.fromkeys(point.precision for point in selected)
    return [(name, [point for point in selected if point.precision == name]) for name in names]


def _best_fit(
    candidates: Iterable[_T], seconds: Callable[[_T, BenchmarkPoint], float], points: Sequence[BenchmarkPoint]
) -> _T:
    """Return the candidate with times nearest to those measured: least squares of the ratios' logarithms."""

    def error(tried: _T) -> float:
        return sum(math.log(seconds(tried, point) / point.seconds) ** 2 for point in points)

    return min(candidates, key=error)
