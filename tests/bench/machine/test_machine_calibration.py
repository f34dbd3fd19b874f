"""Calibration from a machine result: the same points as `wanma cluster --calibrate` measures."""

from __future__ import annotations

import pytest

from wanma.bench.machine.calibration import _calibration_pass, check_savable
from wanma.bench.machine_figures.case_names import PARTS
from wanma.job.errors import JobError
from wanma.planner.hardware_model.calibration import BenchmarkPoint

FIGURES = {
    "products.bf16_flops_per_second": 1e12,
    "product.bf16.64x64x64_seconds": 1e-5,
    "product.fp8.64x64x64_seconds": 1e-6,
    "attention_backward.fp32.2x512x8x64_seconds": 0.02,
    "stream.4096_seconds": 1e-6,
    "dispatch.64_seconds": 1e-4,
    "blocks_tensor.2x4_seconds": 0.01,
    "disk.1000_seconds": 1e-3,
    "copy.1000_seconds": 1e-6,
    "storage_flush.4096_seconds": 1e-4,
    "pair_stream.0-1.1000_seconds": 1e-6,
    "all_reduce.backend.fp32.4096_seconds": 1e-5,
    "all_reduce.ring.fp32.4096_seconds": 2e-5,
    "all_gather.direct.fp32.4096_seconds": 3e-5,
    "all_gather.backend.fp32.4096_seconds": 4e-5,
    "send.backend.fp32.4096_seconds": 5e-5,
    "disturbed_share": 0.25,
    "multiprocessors": 132.0,
}


def test_points_are_those_that_forecasts_know() -> None:
    found = _calibration_pass(FIGURES, 2, has_gpus=False)
    assert found.points == (
        BenchmarkPoint("product", (64, 64, 64), 1e-5, "bf16"),
        BenchmarkPoint("attention_backward", (2, 512, 8, 64), 0.02, "fp32"),
        BenchmarkPoint("stream", (4096,), 1e-6),
        BenchmarkPoint("dispatch", (64,), 1e-4),
        BenchmarkPoint("blocks_tensor", (2, 4), 0.01),
        BenchmarkPoint("disk", (1000,), 1e-3),
        BenchmarkPoint("all_reduce", (2, 4096), 1e-5),
        BenchmarkPoint("all_gather", (2, 4096), 3e-5),
        BenchmarkPoint("tensor_gather", (2, 4096), 4e-5),
        BenchmarkPoint("send", (2, 4096), 5e-5),
    )
    assert found.multiprocessors is None
    assert found.contended_measurements == 2


def test_on_gpus_the_backend_gathers_all() -> None:
    found = _calibration_pass(FIGURES, 2, has_gpus=True)
    gathers = [point for point in found.points if "gather" in point.operator]
    assert {(point.operator, point.seconds) for point in gathers} == {
        ("all_gather", 4e-5),
        ("tensor_gather", 4e-5),
    }
    assert found.multiprocessors == 132


def test_what_gives_no_calibration_is_refused() -> None:
    check_savable({"nodes": "1", "parts": ",".join(PARTS)})
    for nodes, parts, fact in (("2", ",".join(PARTS), "--save with --nodes 2"), ("1", "links", "--save")):
        with pytest.raises(JobError, match=fact):
            check_savable({"nodes": nodes, "parts": parts})
