"""A cluster in one line: what it may say, what it means, and that its print reads back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanma.hardware.catalogue.lookup import CATALOGUE
from wanma.hardware.cluster_file.shorthand import is_shorthand, parse_shorthand
from wanma.job.errors import JobError


@pytest.mark.parametrize(
    ("text", "printed", "devices"),
    [
        (
            "8x8 H100 SXM, 4x100G + 16x8 A100 40GB",
            "8 nodes of 8 × H100 SXM + 16 nodes of 8 × A100 SXM 40 GB, 4 × 100G",
            192,
        ),
        (
            "8 nodes of 8 × H100 + 16 nodes of 8 × A100 40GB, 4 × 100G",
            "8 nodes of 8 × H100 SXM + 16 nodes of 8 × A100 SXM 40 GB, 4 × 100G",
            192,
        ),
        ("2x8 B200 + 1x4 L40S", "2 nodes of 8 × B200, 8 × 400G + 1 node of 4 × L40S, 2 × 200G", 20),
        ("8 H100", "1 node of 8 × H100 SXM, 8 × 400G", 8),
        ("8xH100", "1 node of 8 × H100 SXM, 8 × 400G", 8),
        ("12500 x 8 H100", "12500 nodes of 8 × H100 SXM, 8 × 400G", 100_000),
        (
            "4x2 xeon 8480+, 25Gbit/s + 1x1 EPYC 9654",
            "4 nodes of 112 cores Xeon Platinum 8480+ + 1 node of 96 cores EPYC 9654, 1 × 25G",
            0,
        ),
    ],
)
def test_a_line_is_the_machines_it_says(text: str, printed: str, devices: int) -> None:
    cluster = parse_shorthand(text)
    assert (str(cluster), cluster.device_count) == (printed, devices)


def test_the_cards_of_a_node_are_shared_by_its_devices_and_the_rest_is_the_usual_server() -> None:
    (node,) = parse_shorthand("3x8 A100, 4x100G").nodes
    assert [(level.name, level.bandwidth_bytes_per_second) for level in node.network] == [("network", 6.25e9)]
    assert [(level.name, level.bandwidth_bytes_per_second) for level in node.inside] == [("NVLink 3", 300e9)]
    assert (node.count, node.cores, node.memory_bytes, node.nics) == (3, 128, 2 * 10**12, 4)
    assert node.power_watts == 6500
    assert node.devices[0].power_watts == 400
    (half,) = parse_shorthand("3x4 A100").nodes
    assert half.power_watts is None  # nobody states the power of half a server


def test_the_devices_of_a_rack_share_their_link_beyond_the_node() -> None:
    (node,) = parse_shorthand("36x4 GB200").nodes
    near, far = node.inter_node_level(18), node.inter_node_level(19)
    assert (near.name, near.size, near.bandwidth_bytes_per_second) == ("NVLink 5", 18, 900e9)
    assert (far.name, far.bandwidth_bytes_per_second) == ("network", 50e9)


parts = st.sampled_from(CATALOGUE).flatmap(
    lambda kind: st.builds(
        f"{{}}x{{}} {kind.name}".format,
        st.integers(1, 10**6),
        st.integers(1, 64 if kind.kind == "cpu" else 1024),
    )
)


@given(st.lists(parts, min_size=1, max_size=4), st.integers(1, 64), st.integers(1, 10_000))
def test_what_a_cluster_prints_reads_back_as_the_same_cluster(
    said: list[str], cards: int, gigabits: int
) -> None:
    cluster = parse_shorthand(" + ".join(said) + f", {cards}x{gigabits}G")
    assert is_shorthand(str(cluster))
    assert parse_shorthand(str(cluster)) == cluster


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("8x8 H100 SMX", r"Did you mean 'H100 SXM'\?"),
        ("H100", "'H100' does not describe a cluster"),
        ("0x8 H100", "nodes must be 1 to 1,000,000"),
        ("-2x8 H100", "nodes must be 1 to 1,000,000"),
        ("2x-8 H100", "of a node must be 1 to 1,024"),
        ("1000001x8 H100", "nodes must be 1 to 1,000,000"),
        ("8x0 H100", "of a node must be 1 to 1,024"),
        ("8x2000 H100", "of a node must be 1 to 1,024"),
        ("1x65 Grace", "of a node must be 1 to 64"),
        ("8x8 H100, 4by100", "'4by100' does not describe a network"),
        ("8x8 H100, 0x100G", "1 to 64 NICs"),
        ("8x8 H100, 4x0G", "more than 0 and at most 10,000"),
        ("8x8 H100, 4x100000G", "more than 0 and at most 10,000"),
        ("8x8 H100, 4x100G, 2x25G", "has 2 networks"),
        ("8x8 H100, 4x100G + 2x8 A100, 8x200G + 1x8 B200", "have a network and some have none"),
        ("2x2 EPYC 9654", "the network is unknown"),
        ("2x8 cores H100", "H100 SXM is not a processor"),
        ("", "does not describe a cluster"),
    ],
)
def test_what_is_wrong_is_said_with_the_way_out(text: str, told: str) -> None:
    with pytest.raises(JobError, match=told):
        parse_shorthand(text)
