"""Curves from measured points: what was put in is found again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.machines import CHIP
from wanma.job.errors import WanmaError
from wanma.planner.calibration.curve_fitting import CPU_TILES, fit_hardware_model
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
from wanma.planner.hardware_model.operator_time import attention_seconds, matmul_seconds, memory_bound_seconds

PRODUCTS = ((64, 64, 64), (256, 512, 128), (1024, 512, 512), (2048, 2048, 1024), (512, 512, 4096))
ATTENTION = ((4, 256, 4, 64), (2, 512, 8, 64), (1, 2048, 8, 64))
BUFFERS = (1 << 12, 1 << 16, 1 << 20, 1 << 24)

CPU = DeviceModel(
    "a CPU",
    {"fp32": 200e9},
    20e9,
    1,
    {"fp32": MatmulCurve(0.9, 16.0)},
    AttentionCurve(1.0, 0.0, 1.0),
    {"fp32": AttentionCurve(0.4, 96.0, 0.8)},
    bandwidth_share=1.0,
    launch_seconds=4e-6,
    tiles=CPU_TILES,
)
FACTORS = {"all_gather": (0.5, 0.7), "tensor_scatter": (2.0, 1.8), "send": (0.4, 0.9)}


def machine(chip: DeviceModel = CPU, ranks: int = 2) -> HardwareModel:
    return HardwareModel(
        chip,
        (LinkLevel(ranks, 3e-4, 2e9),),
        dispatch_seconds=0.0,
        start_seconds=0.0,
        collective_factors=FACTORS,
    )


def points(machine: HardwareModel, precision: str, dispatch: float) -> list[BenchmarkPoint]:
    """Noiseless measurements of `machine`."""
    chip, ranks = machine.chip, machine.device_count
    found = [
        BenchmarkPoint("product", shape, matmul_seconds(chip, *shape, precision), precision)
        for shape in PRODUCTS
    ]
    for sequences, length, heads, width in ATTENTION:
        for operator, backward in (("attention", False), ("attention_backward", True)):
            seconds = attention_seconds(
                chip, sequences, length, length, heads, width, backward=backward, precision=precision
            )
            found.append(BenchmarkPoint(operator, (sequences, length, heads, width), seconds, precision))  # type: ignore[arg-type]  # one of them
    found += [
        BenchmarkPoint("stream", (size,), memory_bound_seconds(chip, size))
        for size in (1 << 20, 1 << 24, 1 << 27)
    ]
    found.append(BenchmarkPoint("dispatch", (64,), 64 * dispatch))
    group = RankGroup(ranks)
    for size in BUFFERS:
        timed: dict[BenchmarkKind, float] = {
            "all_reduce": all_reduce_seconds(machine, group, size),
            "all_gather": all_gather_seconds(machine, group, size),
            "reduce_scatter": reduce_scatter_seconds(machine, group, size),
            "tensor_gather": all_gather_seconds(machine, group, size, collective="tensor_gather"),
            "tensor_scatter": reduce_scatter_seconds(machine, group, size, collective="tensor_scatter"),
            "all_to_all": all_to_all_seconds(machine, group, size),
            "send": send_seconds(machine, 1, size),
        }
        if ranks > 1:
            found += [BenchmarkPoint(operator, (ranks, size), seconds) for operator, seconds in timed.items()]
    return found


def test_a_cpu_is_found_again_from_what_it_would_measure() -> None:
    truth = machine()
    found = fit_hardware_model("a CPU", points(truth, "fp32", 4e-6), 2, multiprocessors=None)
    assert found.chip.name == "a CPU"
    assert found.device_count == 2
    assert found.chip.launch_seconds == pytest.approx(4e-6)
    assert found.chip.bandwidth_bytes_per_second == pytest.approx(20e9, rel=0.02)
    for point in points(truth, "fp32", 4e-6):
        if point.operator == "product":
            m, n, k = point.shape
            expected = matmul_seconds(found.chip, m, n, k, "fp32")
        elif point.operator == "attention":
            sequences, length, heads, width = point.shape
            expected = attention_seconds(
                found.chip, sequences, length, length, heads, width, precision="fp32"
            )
        else:
            continue
        assert expected == pytest.approx(point.seconds, rel=0.05), point


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_collective_has_a_rate_of_its_own(ranks: int) -> None:
    truth = machine(ranks=ranks)
    found = fit_hardware_model("a CPU", points(truth, "fp32", 4e-6), ranks, multiprocessors=None)
    group = RankGroup(ranks)
    for size in BUFFERS:
        for of in ("all_gather", "tensor_gather"):
            expected = all_gather_seconds(truth, group, size, collective=of)
            assert all_gather_seconds(found, group, size, collective=of) == pytest.approx(expected, rel=0.25)
        expected = reduce_scatter_seconds(truth, group, size, collective="tensor_scatter")
        assert reduce_scatter_seconds(found, group, size, collective="tensor_scatter") == pytest.approx(
            expected, rel=0.25
        )
        assert send_seconds(found, 1, size) == pytest.approx(send_seconds(truth, 1, size), rel=0.25)


def test_of_a_known_accelerator_peaks_stay_and_curves_change() -> None:
    truth = HardwareModel(CHIP, (LinkLevel(1, 0.0, 1.0),), dispatch_seconds=12e-6)
    known = replace(
        CHIP,
        products={name: MatmulCurve(0.3, 0.0) for name in CHIP.products},
        bandwidth_share=0.5,
        sustained=0.8,
    )
    found = fit_hardware_model(
        "GPU", points(truth, "bf16", 12e-6), 1, multiprocessors=100, catalogue_device=known
    )
    assert found.chip.peak_flops_per_second == CHIP.peak_flops_per_second
    assert found.chip.products["bf16"].attainable == pytest.approx(0.8, abs=0.03)
    assert found.chip.products["fp8"] == known.products["fp8"], "nobody measured it"
    assert found.chip.bandwidth_share == pytest.approx(0.8, rel=0.03)
    assert found.chip.sustained == 0.8, "seconds of measuring do not show hours of load"
    assert found.dispatch_seconds == pytest.approx(12e-6)


def test_of_an_unknown_accelerator_the_best_that_was_measured_is_the_peak() -> None:
    truth = HardwareModel(CHIP, (LinkLevel(1, 0.0, 1.0),))
    measured = points(truth, "bf16", 12e-6)
    found = fit_hardware_model("GPU", measured, 1, multiprocessors=100)
    best = max(
        2.0 * m * n * k / point.seconds
        for point in measured
        if point.operator == "product"
        for m, n, k in [point.shape]
    )
    assert found.chip.peak_flops_per_second == {"bf16": best}


@pytest.mark.parametrize("operator", ["product", "stream", "dispatch"])
def test_without_an_operator_nothing_is_fitted(operator: str) -> None:
    some = [point for point in points(machine(), "fp32", 4e-6) if point.operator != operator]
    with pytest.raises(WanmaError, match=f"lack {operator}"):
        fit_hardware_model("a CPU", some, 2, multiprocessors=None)
