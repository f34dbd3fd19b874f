"""Time of a program beside its kernels, found again in noiseless measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wanma.planner.calibration.curve_fitting import CPU_TILES
from wanma.planner.calibration.framework_benchmarks import (
    BLOCKS,
    benchmark_plans,
    fit_framework_overhead,
    micro_batch_seconds,
)
from wanma.planner.hardware_model.calibration import BenchmarkPoint
from wanma.planner.hardware_model.model import (
    AttentionCurve,
    DeviceModel,
    FrameworkOverhead,
    HardwareModel,
    LinkLevel,
    MatmulCurve,
)
from wanma.planner.hardware_model.operator_time import attention_seconds, matmul_seconds

CPU = HardwareModel(
    DeviceModel(
        "a CPU",
        {"fp32": 100e9},
        10e9,
        1,
        {"fp32": MatmulCurve(0.9, 16.0)},
        AttentionCurve(1.0, 0.0, 1.0),
        {"fp32": AttentionCurve(0.4, 96.0, 0.8)},
        bandwidth_share=1.0,
        launch_seconds=6e-6,
        tiles=CPU_TILES,
    ),
    (LinkLevel(4, 5e-5, 4e9),),
    dispatch_seconds=0.0,
    start_seconds=0.0,
)
TRUTH = FrameworkOverhead(2e-5, 5e-3, 2e-3, 3.5e-3)


def points(ranks: int, program: FrameworkOverhead) -> list[BenchmarkPoint]:
    """Noiseless measurements of CPU with this program."""
    machine = replace(CPU, program=program)
    return [
        BenchmarkPoint(operator, (ranks, BLOCKS), micro_batch_seconds(machine, plan))
        for operator, plan in benchmark_plans(ranks).items()
    ]


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_was_put_in_is_found_again(ranks: int) -> None:
    found = fit_framework_overhead(CPU, points(ranks, TRUTH))
    assert vars(found) == pytest.approx(vars(TRUTH))


def test_what_a_machine_says_of_programs_already_does_not_count() -> None:
    again = fit_framework_overhead(
        replace(CPU, program=FrameworkOverhead(1.0, 1.0, 1.0, 1.0)), points(2, TRUTH)
    )
    assert vars(again) == pytest.approx(vars(TRUTH))


def test_one_rank_splits_nothing_and_three_cannot_split_in_two() -> None:
    assert list(benchmark_plans(1)) == ["blocks"]
    assert "blocks_tensor" not in benchmark_plans(3)
    found = fit_framework_overhead(CPU, points(1, TRUTH))
    assert found == FrameworkOverhead(kernel_seconds=found.kernel_seconds)
    assert found.kernel_seconds == pytest.approx(TRUTH.kernel_seconds)


def test_what_took_no_longer_than_its_kernels_takes_nothing() -> None:
    quick = [replace(point, seconds=point.seconds / 10) for point in points(2, FrameworkOverhead())]
    assert fit_framework_overhead(CPU, quick) == FrameworkOverhead()


def test_without_blocks_among_the_points_there_is_nothing() -> None:
    product = BenchmarkPoint("product", (64, 64, 64), matmul_seconds(CPU.chip, 64, 64, 64, "fp32"), "fp32")
    attended = attention_seconds(CPU.chip, 4, 64, 64, 4, 32, precision="fp32")
    assert (
        fit_framework_overhead(CPU, [product, BenchmarkPoint("attention", (4, 64, 4, 32), attended, "fp32")])
        == FrameworkOverhead()
    )
