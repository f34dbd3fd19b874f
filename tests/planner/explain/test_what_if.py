from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanma.hardware.cluster_file.shorthand import parse_shorthand
from wanma.job.cluster import Cluster, InterconnectLevel
from wanma.job.errors import JobError
from wanma.planner.explain.what_if import apply_changes, parse_changes, with_device_count

EIGHT = parse_shorthand("8x8 H100 SXM, 8x400G")
MIXED = parse_shorthand("8x8 H100 SXM + 16x8 A100 40GB, 4x100G")


def test_more_gpus_are_more_machines_of_the_same_kind() -> None:
    bigger = apply_changes(EIGHT, "gpus=2048")
    assert bigger.device_count == 2048
    assert bigger.nodes[0].count == 256
    assert bigger.nodes[0].network == EIGHT.nodes[0].network


def test_fewer_gpus_than_a_machine_has_are_a_part_of_one() -> None:
    smaller = apply_changes(EIGHT, "gpus=4")
    assert (smaller.node_count, len(smaller.nodes[0].devices)) == (1, 4)
    assert smaller.nodes[0].power_watts == EIGHT.nodes[0].power_watts / 2


def test_a_mixed_cluster_grows_in_proportion() -> None:
    bigger = apply_changes(MIXED, "gpus=384")
    assert [node.count for node in bigger.nodes] == [16, 32]
    assert [node.count for node in apply_changes(MIXED, "nodes=3").nodes] == [1, 2]


def test_gpus_that_fill_no_whole_machines_are_refused_with_the_nearest_that_do() -> None:
    for cluster, changes, way_out in (
        (EIGHT, "gpus=20", "set gpus=16 or gpus=24"),
        (MIXED, "gpus=32", "a multiple of 24"),
    ):
        with pytest.raises(JobError) as error:
            apply_changes(cluster, changes)
        assert way_out in error.value.hint


def test_another_device_brings_its_own_links_and_keeps_the_network_cards() -> None:
    then = apply_changes(parse_shorthand("8x8 A100 SXM 80GB, 4x100G"), "device=H200")
    (node,) = then.nodes
    assert {device.name for device in node.devices} == {"H200 SXM"}
    assert node.count == 8
    assert node.network_text == "4 × 100G"
    assert node.network[-1].bandwidth_bytes_per_second == pytest.approx(4 * 12.5e9 / 8)
    assert node.inside[0].bandwidth_bytes_per_second == 450e9


def test_nvlink_between_machines_comes_and_goes_with_its_device() -> None:
    rack = parse_shorthand("36x4 GB200 NVL72")
    assert len(rack.nodes[0].network) == 2
    alone = apply_changes(rack, "device=H100 SXM")
    assert len(alone.nodes[0].network) == 1
    again = apply_changes(alone, "device=GB200")
    assert again.nodes[0].network == rack.nodes[0].network


def test_memory_of_every_device_changes() -> None:
    assert {device.memory_bytes for device in apply_changes(EIGHT, "memory=40GB").nodes[0].devices} == {
        40 * 10**9
    }
    assert apply_changes(EIGHT, "memory=40GiB").nodes[0].devices[0].memory_bytes == 40 * 2**30


def test_the_network_between_machines_is_given_by_cards_and_their_rate() -> None:
    assert apply_changes(EIGHT, "link.inter_node=200G").nodes[0].network[0].bandwidth_bytes_per_second == 25e9
    slower = apply_changes(EIGHT, "link.inter_node=2x100G").nodes[0]
    assert (slower.nics, slower.nic_bytes_per_second) == (2, 12.5e9)
    assert slower.network[0].bandwidth_bytes_per_second == pytest.approx(2 * 12.5e9 / 8)


def test_levels_of_a_network_keep_their_proportions() -> None:
    rail, spine = InterconnectLevel("rail", 50e9, 1e-6, 32), InterconnectLevel("spine", 25e9, 3e-6)
    node = replace(EIGHT.nodes[0], network=(rail, spine))
    then = apply_changes(Cluster((node,)), "link.inter_node=8x800G").nodes[0].network
    assert [level.bandwidth_bytes_per_second for level in then] == [200e9, 100e9]


def test_the_link_inside_a_machine_is_given_in_bytes() -> None:
    assert (
        apply_changes(EIGHT, "link.intra_node=900GB").nodes[0].inside[0].bandwidth_bytes_per_second == 900e9
    )


def test_several_changes_hold_at_once_in_any_order() -> None:
    one = apply_changes(EIGHT, "device=H200 SXM, gpus=128,memory=100GB")
    assert one == apply_changes(EIGHT, "memory=100GB, gpus=128, device=H200 SXM")
    assert (one.device_count, one.nodes[0].devices[0].memory_bytes) == (128, 100 * 10**9)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpu=12", "Did you mean 'gpus'"),
        ("link.inter=200G", "Did you mean 'link.inter_node'"),
        ("device=H100 SXN", "Did you mean 'H100 SXM'"),
        ("device=EPYC 7742", "is a CPU"),
        ("gpus=0", "an integer from 1"),
        ("gpus=-8", "an integer from 1"),
        ("gpus=many", "an integer from 1"),
        ("nodes=1000001", "an integer from 1 to 1,000,000"),
        ("memory=40", "not a size"),
        ("memory=0GB", "more than 0 and at most 1,000 TB"),
        ("memory=1001TB", "more than 0 and at most 1,000 TB"),
        ("link.intra_node=0GB", "more than 0 and at most 100 TB"),
        ("link.intra_node=101TB", "more than 0 and at most 100 TB"),
        ("link.inter_node=fast", "does not describe a network"),
        ("link.inter_node=0G", "more than 0 and at most"),
        ("gpus", "KEY=VALUE"),
        ("gpus=", "KEY=VALUE"),
        ("gpus=8, gpus=16", "given twice"),
        ("gpus=8, nodes=1", "both set the size"),
        (" , ", "is empty"),
    ],
)
def test_what_cannot_be_is_refused_with_its_cause(text: str, said: str) -> None:
    with pytest.raises(JobError, match=said) as error:
        apply_changes(EIGHT, text)
    assert error.value.message.startswith("--what-if")


def test_a_network_of_unknown_cards_needs_their_number() -> None:
    cluster = Cluster((replace(EIGHT.nodes[0], nics=0, nic_bytes_per_second=None),))
    with pytest.raises(JobError, match="the network cards of") as error:
        apply_changes(cluster, "link.inter_node=200G")
    assert "8x400G" in error.value.hint
    assert apply_changes(cluster, "link.inter_node=8x200G").nodes[0].nics == 8


def test_gpus_without_accelerators_are_refused() -> None:
    with pytest.raises(JobError, match="this cluster has no accelerators"):
        apply_changes(parse_shorthand("2x64 cores EPYC 7742, 1x25G"), "gpus=8")


@given(st.integers(1, 4096), st.integers(1, 4096))
def test_growing_and_shrinking_again_gives_the_same_cluster(first: int, second: int) -> None:
    start = with_device_count(EIGHT, 8 * first)
    assert with_device_count(with_device_count(start, 8 * second), 8 * first) == start


def test_changes_are_read_as_written() -> None:
    assert parse_changes("gpus = 2_048 , device=H200 SXM") == {"gpus": "2_048", "device": "H200 SXM"}
