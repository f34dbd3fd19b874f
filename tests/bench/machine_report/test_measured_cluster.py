"""Measured links between nodes as a cluster file, and what a plan makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from support.machine_results import LATENCY, RATE, machine_result
from wanma.bench.machine_report.measured_cluster import measured_cluster
from wanma.hardware.cluster_file.export import export_cluster
from wanma.hardware.cluster_file.reader import read_cluster
from wanma.job.errors import WanmaError
from wanma.job.file.loading import to_job
from wanma.job.forecast.forecast import StepTime
from wanma.job.plan.plan import Plan
from wanma.planner.presentation.plan_analysis import analyze_plan, may_be_faster_without

NODES = 5


def test_equal_links_are_one_group() -> None:
    (group,) = measured_cluster(machine_result(NODES, nodes=NODES)).nodes
    (level,) = group.network
    assert group.count == NODES
    # The fixture's nodes have two devices, of which one was measured alone.
    assert level.bandwidth_bytes_per_second == pytest.approx(RATE / 2, rel=0.3)
    assert level.latency_seconds == pytest.approx(LATENCY, rel=0.3)


def slow_node(first: int, second: int) -> float:
    return 0.1 if 2 in (first, second) else 1.0


def test_a_node_behind_a_slow_link_is_a_group_of_its_own_which_the_plan_leaves_out(tmp_path: Path) -> None:
    result = machine_result(NODES, nodes=NODES, speed=slow_node)
    hardware = {**result.hardware, "cluster": read_cluster("1x8 cores EPYC 9654").to_json()}
    cluster = measured_cluster(replace(result, hardware=hardware))
    assert [(group.name, group.count) for group in cluster.nodes] == [("nodes", NODES - 1), ("node 2", 1)]
    usual, slow = (group.network[0].bandwidth_bytes_per_second for group in cluster.nodes)
    assert slow / usual == pytest.approx(0.1, rel=0.3)
    file = tmp_path / "cluster.toml"
    file.write_text(export_cluster(cluster))
    read = read_cluster(str(file))
    assert [(group.name, group.network) for group in read.nodes] == [
        (group.name, group.network) for group in cluster.nodes
    ]
    job = to_job(
        {
            "parallel": "auto",
            "model": {"preset": "gpt-1m"},
            "data": {"text": ["stdlib"]},
            "train": {"global_batch": 40},
        }
    )
    slowing = analyze_plan(job, cluster=str(file)).slowing_nodes
    assert slowing is not None
    assert slowing.nodes.name == "node 2"
    assert slowing.speedup > 1.05
    assert analyze_plan(job, cluster="4x8 cores EPYC 9654, 100G").slowing_nodes is None


def test_nodes_are_left_out_on_trial_only_where_communication_or_unequal_work_may_cost_more() -> None:
    fast, slow = (
        replace(group, name=name)
        for group in read_cluster("2x8 cores EPYC 9654, 100G").nodes
        for name in ("fast", "slow")
    )
    groups, plan = (fast, slow), Plan(dp_replicate=4)
    assert not may_be_faster_without(slow, StepTime(1.0, compute=0.9), plan, groups)
    assert may_be_faster_without(slow, StepTime(3.0, compute=0.9), plan, groups)
    weak = replace(slow, cores=1)
    unequal = StepTime(1.0, compute=1.0)
    assert may_be_faster_without(weak, unequal, plan, (fast, weak))
    shared = Plan(dp_replicate=2, batch_shares=(8, 1))
    assert not may_be_faster_without(weak, unequal, shared, (fast, weak))


def crossed_link(first: int, second: int) -> float:
    return 0.2 if {first, second} == {1, 3} else 1.0


def test_one_slow_link_is_the_rate_of_the_ring_over_it() -> None:
    (group,) = measured_cluster(machine_result(NODES, nodes=NODES, speed=crossed_link)).nodes
    assert group.network[0].bandwidth_bytes_per_second == pytest.approx(0.2 * RATE / 2, rel=0.3)


def test_a_result_of_one_node_is_refused() -> None:
    with pytest.raises(WanmaError, match="no links between nodes"):
        measured_cluster(machine_result(4))
