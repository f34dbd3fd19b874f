"""A cluster as data: counts without copies, levels of its network, one line of text, JSON and back."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanma.job.cluster import Cluster, Device, InterconnectLevel, NodeGroup
from wanma.job.errors import JobError

H100 = Device("cuda", "H100", 80 * 10**9, {"bf16": 989e12}, 3350e9, 700.0)
NVLINK = InterconnectLevel("NVLink", 450e9, 6e-7)
RACK, SPINE = InterconnectLevel("rack", 50e9, 2e-6, 16), InterconnectLevel("spine", 25e9, 4e-6)
BOX = NodeGroup("box", 64, 10**12, (H100,) * 8, 12_500, (NVLINK,), (RACK, SPINE), 8, 50e9)


def test_a_hundred_thousand_devices_are_one_node_with_a_count() -> None:
    cluster = Cluster((BOX,))
    assert (cluster.node_count, cluster.device_count) == (12_500, 100_000)
    assert len(pickle.dumps(cluster)) < 2000
    assert len(json.dumps(cluster.to_json())) < 4000


def test_neighbours_reach_each_other_over_the_nearest_level_that_holds_them() -> None:
    assert BOX.intra_node_level(8) == NVLINK
    assert BOX.inter_node_level(16) == RACK
    assert BOX.inter_node_level(17) == SPINE
    assert replace(BOX, network=(RACK,)).inter_node_level(17) is None


def test_unlike_machines_meet_at_the_slower_bandwidth_and_the_longer_latency() -> None:
    other = replace(BOX, network=(InterconnectLevel("network", 12.5e9, 1e-6),))
    assert Cluster((BOX, other)).inter_group_level() == InterconnectLevel("network", 12.5e9, 4e-6)
    assert Cluster((BOX, replace(other, network=()))).inter_group_level() is None
    wan = InterconnectLevel("wan", 1e9, 0.01)
    assert Cluster((BOX, other), wan).inter_group_level() == wan


def test_a_cluster_prints_as_one_line() -> None:
    few = replace(BOX, count=8)
    assert str(Cluster((few,))) == "8 nodes of 8 × H100, 8 × 400G"
    other = NodeGroup("old", 8, 10**11, (H100,), 1)
    assert str(Cluster((few, other))) == "8 nodes of 8 × H100, 8 × 400G + 1 node of 1 × H100"
    assert str(Cluster((NodeGroup("laptop", 8, 10**10, ()),))) == "1 node of 8 cores"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"count": 0}, "'box': count = 0 must be at least 1"),
        ({"cores": -1}, "'box': cores = -1 must be at least 1"),
        ({"memory_bytes": 0}, "'box': memory_bytes = 0 must be"),
        ({"network": (SPINE, RACK)}, r"\(given: spine all, rack 16\)"),
        ({"inside": (NVLINK, NVLINK)}, "sizes of the levels inside must rise"),
    ],
)
def test_impossible_machines_are_refused(wrong: dict[str, object], told: str) -> None:
    with pytest.raises(JobError, match=told):
        replace(BOX, **wrong)  # type: ignore[arg-type]  # every value is one of a field


def test_a_cluster_without_machines_is_refused() -> None:
    with pytest.raises(JobError, match="at least one node"):
        Cluster(())


def test_json_of_an_older_run_lacks_what_was_not_known_then_and_nothing_unknown_passes() -> None:
    device = {"kind": "cuda", "name": "A", "memory_bytes": 5, "peak_flops_per_second": {}}
    old = {"nodes": [{"name": "n", "cores": 2, "memory_bytes": 9, "devices": [device]}]}
    assert Cluster.from_json(old) == Cluster((NodeGroup("n", 2, 9, (Device("cuda", "A", 5, {}),)),))
    with pytest.raises(ValueError, match=r"unknown node fields \['gpus'\]"):
        Cluster.from_json({"nodes": [{"gpus": 2}]})


levels = st.builds(InterconnectLevel, st.text(), st.floats(1, 1e12), st.floats(0, 1))


@given(
    st.builds(
        Device, st.sampled_from(["cpu", "cuda", "other"]), st.text(), st.integers(1), st.just({"fp32": 1.5})
    ),
    st.lists(levels, max_size=3),
    st.none() | levels,
)
def test_json_and_back_is_the_same_cluster(
    device: Device, links: list[InterconnectLevel], between: InterconnectLevel | None
) -> None:
    rising = tuple(replace(level, size=2**power) for power, level in enumerate(links, 1))
    node = NodeGroup("n", 3, 7, (device,) * 2, 9, rising, rising, 4, 1.5e9, device, 12.5)
    cluster = Cluster((node, NodeGroup("m", 1, 1, ())), between)
    assert Cluster.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster
    assert hash(pickle.loads(pickle.dumps(cluster))) == hash(cluster)
