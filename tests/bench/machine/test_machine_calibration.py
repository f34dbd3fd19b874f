"""Calibration from a machine result: the points that forecasts know, and the ranks that are measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wanma.bench.machine.calibration import check_savable, fastest_points
from wanma.bench.machine_benchmark import machine_suite
from wanma.bench.machine_figures.case_names import PARTS
from wanma.hardware.catalogue.lookup import require_device_kind
from wanma.hardware.discovery.node import discover_node
from wanma.job.errors import JobError
from wanma.planner.calibration.local_node import rank_counts
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
    assert fastest_points([FIGURES], 2, has_gpus=False) == (
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


def test_of_several_executions_the_least_time_of_each_point_counts() -> None:
    slower = FIGURES | {"stream.4096_seconds": 9e-6, "disk.1000_seconds": 1e-4}
    seconds = {point.operator: point.seconds for point in fastest_points([FIGURES, slower], 2, False)}
    assert (seconds["stream"], seconds["disk"]) == (1e-6, 1e-4)


def test_on_gpus_the_backend_gathers_all() -> None:
    points = fastest_points([FIGURES], 2, has_gpus=True)
    gathers = {(point.operator, point.seconds) for point in points if "gather" in point.operator}
    assert gathers == {("all_gather", 4e-5), ("tensor_gather", 4e-5)}


def test_a_calibration_has_the_numbers_of_ranks_between_which_forecasts_choose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (node,) = discover_node().nodes
    eight = replace(node, devices=(), cores=8)
    monkeypatch.setattr("wanma.bench.machine_benchmark.measured_node", lambda _: eight)
    for calibrates, ranks in ((False, ["1", "8"]), (True, ["1", "2", "4", "8"])):
        suite, _ = machine_suite(parts=["compute"], calibrates=calibrates)
        assert [contender.settings["ranks"] for contender in suite.contenders] == ranks


def test_more_ranks_than_gpus_are_refused() -> None:
    (node,) = discover_node().nodes
    two = replace(node, devices=(require_device_kind("H100 SXM").to_device(),) * 2)
    with pytest.raises(JobError, match="--ranks 4: this node has 2 GPUs"):
        rank_counts(two, [4])


def test_what_gives_no_calibration_is_refused() -> None:
    check_savable({"nodes": "1", "parts": ",".join(PARTS)})
    for nodes, parts, fact in (("2", ",".join(PARTS), "--save with --nodes 2"), ("1", "links", "--save")):
        with pytest.raises(JobError, match=fact):
            check_savable({"nodes": nodes, "parts": parts})
