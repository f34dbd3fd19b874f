"""Throughput over numbers of devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wanma.hardware.cluster_file.shorthand import parse_shorthand
from wanma.job.cluster import Cluster
from wanma.job.errors import JobError
from wanma.job.forecast.forecast import Forecast, StepTime
from wanma.job.plan.plan import Plan
from wanma.planner.explain.scaling import MAX_POINTS, parse_device_range, scaling_curve, scaling_unit
from wanma.planner.search.result import Candidate, SearchResult

CLUSTER = parse_shorthand("8x8 H100 SXM, 8x400G")


def found_at(rate: float | None) -> SearchResult:
    if rate is None:
        return SearchResult((), (), None, 0)
    forecast = Forecast(1, 1, 1, 1, 1, step=StepTime(1.0, 1.0), samples_per_second=rate)
    one = Candidate(Plan(), forecast)
    return SearchResult((one,), (one,), None, 1)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("64..512", [64, 128, 256, 512]),
        ("8 .. 20", [8, 16, 20]),
        ("1_024..1024", [1024]),
        ("24..100", [24, 48, 96, 100]),
    ],
)
def test_a_range_is_its_doublings_and_its_end(text: str, counts: list[int]) -> None:
    assert parse_device_range(text) == counts


@pytest.mark.parametrize("text", ["64", "64-128", "128..64", "0..8", "a..b", f"1..{2**MAX_POINTS}", "-8..8"])
def test_other_ranges_are_refused(text: str) -> None:
    with pytest.raises(JobError, match="--scale"):
        parse_device_range(text)


def test_efficiency_is_that_of_a_device_next_to_the_first_points() -> None:
    rates = {8: 10.0, 16: 18.0, 32: 20.0}
    points = scaling_curve(CLUSTER, [8, 16, 32], lambda cluster: found_at(rates[cluster.device_count]))
    assert [point.device_count for point in points] == [8, 16, 32]
    assert [point.efficiency for point in points] == pytest.approx([1.0, 0.9, 0.5])


def test_where_wanma_runs_no_plan_the_points_are_forecasts_only() -> None:
    (one,) = found_at(10.0).candidates
    foreign = replace(one, unsupported_reason="wanma does not support TPU v4")
    (point,) = scaling_curve(CLUSTER, [8], lambda _: SearchResult((foreign,), (foreign,), None, 1))
    assert point.best == foreign


def test_nodes_without_accelerators_are_counted_as_nodes() -> None:
    cpus = Cluster((replace(CLUSTER.nodes[0], devices=(), count=2),))
    points = scaling_curve(cpus, [1, 4], lambda cluster: found_at(10.0 * cluster.node_count))
    assert [point.efficiency for point in points] == [1.0, 1.0]
    assert scaling_unit(points) == "nodes"
    mixed = Cluster((*cpus.nodes, replace(cpus.nodes[0], name="other")))
    (point,) = scaling_curve(mixed, [4], lambda _: found_at(1.0))
    assert point.reason == "a scaling over CPUs needs nodes of one kind"
    assert scaling_unit([point]) == "devices"


def test_points_without_a_plan_say_why() -> None:
    def plans(cluster: Cluster) -> SearchResult:
        if cluster.device_count == 16:
            raise JobError("too few samples")
        return found_at(None if cluster.device_count == 8 else 30.0)

    points = scaling_curve(CLUSTER, [8, 16, 20, 24], plans)
    assert [point.best is None for point in points] == [True, True, True, False]
    assert points[0].reason == "there is no plan"
    assert points[1].reason == "too few samples"
    assert "nodes have 8 devices each" in points[2].reason
    assert points[3].efficiency == 1.0
