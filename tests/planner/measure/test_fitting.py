"""Curves from measured points: what was put in is found again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.machines import CHIP
from wanma.job.errors import WanmaError
from wanma.planner.calibration.curve_fitting import CPU_TILES, fitted_machine
from wanma.planner.hardware_model.calibration import Operator, Point
from wanma.planner.hardware_model.collective_time import (
    Group,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    reduce_scatter_seconds,
    send_seconds,
)
from wanma.planner.hardware_model.model import AttentionCurve, Chip, Link, Machine, ProductCurve
from wanma.planner.hardware_model.operator_time import attention_seconds, product_seconds, streaming_seconds

PRODUCTS = ((64, 64, 64), (256, 512, 128), (1024, 512, 512), (2048, 2048, 1024), (512, 512, 4096))
ATTENTION = ((4, 256, 4, 64), (2, 512, 8, 64), (1, 2048, 8, 64))
BUFFERS = (1 << 12, 1 << 16, 1 << 20, 1 << 24)

CPU = Chip(
    "a CPU",
    {"fp32": 200e9},
    20e9,
    1,
    {"fp32": ProductCurve(0.9, 16.0)},
    AttentionCurve(1.0, 0.0, 1.0),
    {"fp32": AttentionCurve(0.4, 96.0, 0.8)},
    bandwidth_share=1.0,
    launch_seconds=4e-6,
    tiles=CPU_TILES,
)
FACTORS = {"all_gather": (0.5, 0.7), "tensor_scatter": (2.0, 1.8), "send": (0.4, 0.9)}


def machine(chip: Chip = CPU, ranks: int = 2) -> Machine:
    return Machine(
        chip,
        (Link(ranks, 3e-4, 2e9),),
        dispatch_seconds=0.0,
        start_seconds=0.0,
        collective_factors=FACTORS,
    )


def points(machine: Machine, precision: str, dispatch: float) -> list[Point]:
    """Noiseless measurements of `machine`."""
    chip, ranks = machine.chip, machine.devices
    found = [
        Point("product", shape, product_seconds(chip, *shape, precision), precision) for shape in PRODUCTS
    ]
    for sequences, length, heads, width in ATTENTION:
        for operator, backward in (("attention", False), ("attention_backward", True)):
            seconds = attention_seconds(
                chip, sequences, length, length, heads, width, backward=backward, precision=precision
            )
            found.append(Point(operator, (sequences, length, heads, width), seconds, precision))  # type: ignore[arg-type]  # one of them
    found += [Point("stream", (size,), streaming_seconds(chip, size)) for size in (1 << 20, 1 << 24, 1 << 27)]
    found.append(Point("dispatch", (64,), 64 * dispatch))
    group = Group(ranks)
    for size in BUFFERS:
        timed: dict[Operator, float] = {
            "all_reduce": all_reduce_seconds(machine, group, size),
            "all_gather": all_gather_seconds(machine, group, size),
            "reduce_scatter": reduce_scatter_seconds(machine, group, size),
            "tensor_gather": all_gather_seconds(machine, group, size, of="tensor_gather"),
            "tensor_scatter": reduce_scatter_seconds(machine, group, size, of="tensor_scatter"),
            "all_to_all": all_to_all_seconds(machine, group, size),
            "send": send_seconds(machine, 1, size),
        }
        if ranks > 1:
            found += [Point(operator, (ranks, size), seconds) for operator, seconds in timed.items()]
    return found


def test_a_cpu_is_found_again_from_what_it_would_measure() -> None:
    truth = machine()
    found = fitted_machine("a CPU", points(truth, "fp32", 4e-6), 2, processors=None)
    assert found.chip.name == "a CPU"
    assert found.devices == 2
    assert found.chip.launch_seconds == pytest.approx(4e-6)
    assert found.chip.bandwidth_bytes_per_second == pytest.approx(20e9, rel=0.02)
    for point in points(truth, "fp32", 4e-6):
        if point.operator == "product":
            m, n, k = point.shape
            expected = product_seconds(found.chip, m, n, k, "fp32")
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
    found = fitted_machine("a CPU", points(truth, "fp32", 4e-6), ranks, processors=None)
    group = Group(ranks)
    for size in BUFFERS:
        for of in ("all_gather", "tensor_gather"):
            expected = all_gather_seconds(truth, group, size, of=of)
            assert all_gather_seconds(found, group, size, of=of) == pytest.approx(expected, rel=0.25)
        expected = reduce_scatter_seconds(truth, group, size, of="tensor_scatter")
        assert reduce_scatter_seconds(found, group, size, of="tensor_scatter") == pytest.approx(
            expected, rel=0.25
        )
        assert send_seconds(found, 1, size) == pytest.approx(send_seconds(truth, 1, size), rel=0.25)


def test_of_a_known_accelerator_peaks_stay_and_curves_change() -> None:
    truth = Machine(CHIP, (Link(1, 0.0, 1.0),), dispatch_seconds=12e-6)
    known = replace(
        CHIP,
        products={name: ProductCurve(0.3, 0.0) for name in CHIP.products},
        bandwidth_share=0.5,
        sustained=0.8,
    )
    found = fitted_machine("GPU", points(truth, "bf16", 12e-6), 1, processors=100, known=known)
    assert found.chip.peak_flops_per_second == CHIP.peak_flops_per_second
    assert found.chip.products["bf16"].attainable == pytest.approx(0.8, abs=0.03)
    assert found.chip.products["fp8"] == known.products["fp8"], "nobody measured it"
    assert found.chip.bandwidth_share == pytest.approx(0.8, rel=0.03)
    assert found.chip.sustained == 0.8, "seconds of measuring do not show hours of load"
    assert found.dispatch_seconds == pytest.approx(12e-6)


def test_of_an_unknown_accelerator_the_best_that_was_measured_is_the_peak() -> None:
    truth = Machine(CHIP, (Link(1, 0.0, 1.0),))
    measured = points(truth, "bf16", 12e-6)
    found = fitted_machine("GPU", measured, 1, processors=100)
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
        fitted_machine("a CPU", some, 2, processors=None)
