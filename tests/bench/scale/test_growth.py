"""Numbers of ranks, the settings of a job on each, and the nodes that they take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from wanma.bench.scale import targets
from wanma.bench.scale.growth import default_axis, growth_of
from wanma.bench.scale.targets import target_here, target_of_cluster, target_of_device
from wanma.bench.suites.scale_table import doubled_counts, parse_counts
from wanma.hardware.cluster_file.shorthand import parse_shorthand
from wanma.job.cluster import Cluster
from wanma.job.errors import JobError, WanmaError
from wanma.job.sections.job import Job


def job(parallel: dict[str, Any] | str | None = None, batch: int = 16) -> Job:
    return Job.model_validate(
        {
            "model": {"preset": "gpt-1m"},
            "data": {"text": "stdlib"},
            "train": {"global_batch": batch},
            "parallel": {"auto": True} if parallel == "auto" else parallel or {},
        }
    )


@pytest.mark.parametrize(
    ("text", "counts"),
    [("1,2,4", [1, 2, 4]), ("4,1,1", [1, 4]), ("1..6", [1, 2, 4, 6]), ("100_000", [100_000]), ("none", [])],
)
def test_numbers_of_ranks(text: str, counts: list[int]) -> None:
    assert parse_counts(text) == counts


@pytest.mark.parametrize("text", ["", "0,1", "two", "1..x", "-1", "10000000"])
def test_wrong_numbers_of_ranks_are_refused(text: str) -> None:
    with pytest.raises(WanmaError, match="expected numbers of ranks"):
        parse_counts(text)


def test_counts_double_to_the_last_one_and_take_others_along() -> None:
    assert doubled_counts(8, 100, also=[12, 1000]) == [8, 12, 16, 32, 64, 100]


def test_one_dimension_grows_and_the_batch_stays() -> None:
    growth = growth_of(
        job({"tp": 2, "dp_replicate": 4}), "dp_replicate", is_weak=False, batch_ranks=2, settings={"a.b": "c"}
    )
    assert growth.settings_of(8) == {"a.b": "c", "parallel.dp_replicate": "4"}
    assert growth.batch_of(8) == 16
    with pytest.raises(WanmaError, match="3 ranks are no multiple of 2"):
        growth.settings_of(3)


def test_weak_scaling_keeps_the_batch_of_a_rank() -> None:
    growth = growth_of(job(batch=16), "dp_replicate", is_weak=True, batch_ranks=2, settings={})
    assert [growth.settings_of(ranks)["train.global_batch"] for ranks in (1, 2, 4)] == ["8", "16", "32"]
    odd = growth_of(job(batch=6), "dp_replicate", is_weak=True, batch_ranks=4, settings={})
    assert odd.batch_of(2) == 3
    with pytest.raises(WanmaError, match="cannot be as large for each of 1"):
        odd.batch_of(1)


def test_one_rank_has_nobody_to_shard_with() -> None:
    sharded = job({"shard": "optimizer", "dp_shard": 2})
    growth = growth_of(sharded, "dp_shard", is_weak=False, batch_ranks=1, settings={})
    assert growth.settings_of(1) == {"parallel.dp_shard": "1", "parallel.shard": "none"}
    assert growth.settings_of(2) == {"parallel.dp_shard": "2"}


@pytest.mark.parametrize(
    ("parallel", "device", "axis"),
    [
        ({}, "cuda", "dp_replicate"),
        ("auto", "cuda", "dp_shard"),
        ("auto", "cpu", "dp_replicate"),
        ({"dp_shard": 2}, "cpu", "dp_shard"),
        ({"dp_replicate": 2, "tp": 2}, "cuda", "dp_replicate"),
    ],
)
def test_the_dimension_that_grows_by_default(parallel: dict[str, Any] | str, device: str, axis: str) -> None:
    assert default_axis(job(parallel), device) == axis


def test_an_open_layout_is_closed_for_its_growth() -> None:
    growth = growth_of(job("auto"), "dp_shard", is_weak=False, batch_ranks=1, settings={})
    assert growth.settings_of(4) == {
        "parallel.auto": "false",
        "parallel.recompute": "auto",
        "parallel.dp_shard": "4",
    }


def test_devices_come_in_their_usual_servers() -> None:
    target = target_of_device("H100 SXM")
    assert (target.unit, target.ranks_per_node) == ("GPUs", 8)
    assert [str(target.nodes_for(ranks).nodes[0]) for ranks in (1, 64)] == [
        "1 node of 1 × H100 SXM",
        "8 nodes of 8 × H100 SXM",
    ]
    with pytest.raises(JobError, match="nodes have 8 devices each"):
        target.nodes_for(12)
    with pytest.raises(JobError, match="is a processor"):
        target_of_device("EPYC 9654")


def test_ranks_on_processors_fill_one_node_after_another() -> None:
    target = target_of_cluster("4x64 cores EPYC 9654, 1x100G", threads_per_rank=16)
    assert (target.unit, target.ranks_per_node) == ("ranks", 4)
    assert [target.nodes_for(ranks).node_count for ranks in (1, 4, 8, 4096)] == [1, 1, 2, 1024]
    with pytest.raises(JobError, match="6 ranks fill no whole nodes of 4"):
        target.nodes_for(6)
    assert target_of_cluster("4x64 cores EPYC 9654, 1x100G").ranks_per_node == 1


def test_nodes_like_this_one_have_the_network_that_is_given() -> None:
    target = target_here([1, 2], uses_cpu=True, network="2x25G")
    assert target.is_here
    assert (target.ranks_per_node, target.unit) == (2, "ranks")
    (node,) = target.nodes_for(8).nodes
    assert (node.count, node.network_text, node.devices) == (4, "2 × 25G", ())
    (alone,) = target_here([1], uses_cpu=True, network=None).cluster.nodes
    assert alone.network == ()


@pytest.mark.parametrize(("devices", "network"), [(8, "8 × 400G"), (2, "2 × 400G"), (1, "1 × 400G")])
def test_a_part_of_a_server_has_its_part_of_the_network(
    devices: int, network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (node,) = parse_shorthand(f"1x{devices} H100 SXM").nodes
    cluster = Cluster((replace(node, network=(), nics=0, nic_bytes_per_second=None),))
    monkeypatch.setattr(targets, "with_measured_cpu_peak", lambda _: cluster)
    target = target_here([], uses_cpu=False, network=None)
    assert (target.unit, target.ranks_per_node) == ("GPUs", devices)
    assert target.nodes_for(4 * devices).nodes[0].network_text == network
