"""Cluster files: what they mean, every mistake with its line, and that a written file reads back."""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanma.hardware.catalogue.device_kind import DeviceKind
from wanma.hardware.catalogue.lookup import CATALOGUE
from wanma.hardware.cluster_file.export import export_cluster
from wanma.hardware.cluster_file.reader import load_cluster_file, read_cluster
from wanma.hardware.cluster_file.schema import ClusterFile
from wanma.hardware.cluster_file.shorthand import parse_shorthand
from wanma.hardware.discovery.node import discover_node
from wanma.job.cluster import Cluster, Device, InterconnectLevel, NodeGroup
from wanma.job.errors import JobError, WanmaError
from wanma.job.file.reference import markdown_table
from wanma.job.file.schema import schema_tables

MIXED = """
[[nodes]]
count = 8
device = "H100 SXM"
network = "4x100G"

[[nodes.levels]]
name = "rack"
size = 4

[[nodes.levels]]
name = "spine"
gb_per_second = 3.125
latency_microseconds = 8.5

[[nodes]]
count = 16
device = "Ours"
devices = 4
cores = 32
memory_gb = 256
network = "2x100G"
cpu = "EPYC 9654"
power_watts = 3000
price_per_hour = 24.5
days_between_failures = 154

[[nodes.levels]]
name = "bridge"
inside = true
size = 2
gb_per_second = 100

[[nodes.levels]]
name = "PCIe"
inside = true
gb_per_second = 16
latency_microseconds = 1

[[devices]]
name = "Ours"
memory_gb = 40
peak_teraflops = { bf16 = 100, fp32 = 10 }
gb_per_second = 1000
power_watts = 250

[between]
gb_per_second = 1
latency_microseconds = 50
"""


def loaded(text: str) -> Cluster:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        path.write_text(text, encoding="utf-8")
        return load_cluster_file(path)


def refusal(path: Path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(JobError) as caught:
        load_cluster_file(path)
    return str(caught.value)


def test_a_file_is_the_machines_it_describes() -> None:
    cluster = loaded(MIXED)
    h100, ours = cluster.nodes
    assert (h100.count, len(h100.devices), h100.cores, h100.nics) == (8, 8, 112, 4)
    assert h100.nic_bytes_per_second == 12.5e9
    assert h100.network == (
        InterconnectLevel("rack", 6.25e9, 2.7e-6, 4),
        InterconnectLevel("spine", 3.125e9, 8.5e-6),
    )
    assert h100.inside == (InterconnectLevel("NVLink 4", 450e9, 6e-7),)
    assert set(ours.devices) == {
        Device("cuda", "Ours", 40 * 10**9, {"bf16": 1e14, "fp32": 1e13}, 1e12, 250.0)
    }
    assert (ours.device_count, ours.cores, ours.memory_bytes, ours.power_watts) == (64, 32, 256 * 10**9, 3000)
    assert ours.price_per_hour == 24.5
    assert (ours.days_between_failures, h100.days_between_failures) == (154.0, None)
    assert ours.inside == (InterconnectLevel("bridge", 100e9, 6e-7, 2), InterconnectLevel("PCIe", 16e9, 1e-6))
    assert ours.network == (InterconnectLevel("network", 6.25e9, 2.7e-6),)
    assert ours.cpu.peak_flops_per_second["fp32"] == pytest.approx(32 * 2.4e9 * 32)
    assert cluster.between == InterconnectLevel("between", 1e9, 5e-5)


def test_a_device_s_name_is_enough() -> None:
    assert loaded('[[nodes]]\ndevice = "b200"\ncount = 3\n') == parse_shorthand("3x8 B200")


def test_what_the_file_says_of_a_device_comes_before_the_catalogue() -> None:
    (node,) = loaded('[[devices]]\nname = "B200"\nmemory_gb = 180\n[[nodes]]\ndevice = "B200"\n').nodes
    assert node.devices[0].memory_bytes == 180 * 10**9


def test_every_mistake_is_told_at_once_with_its_line_and_what_is_allowed(tmp_path: Path) -> None:
    text = refusal(
        tmp_path / "c.toml",
        '[[nodes]]\ncount = 0\nnetwrok = "4x100G"\ndevices = 2000\n'
        '[[nodes.levels]]\nname = "rack"\nsize = -1\n[[devices]]\nname = "X"\nmemory_gb = "big"\n'
        "peak_teraflops = { bf61 = 3 }\n[clutser]\n",
    )
    for line in (
        "the cluster has 7 mistakes",
        "c.toml:2: nodes[0].count = 0: must be a whole number >= 1 and <= 1,000,000.",
        "c.toml:3: unknown key 'nodes[0].netwrok'. Did you mean 'nodes[0].network'?",
        "c.toml:4: nodes[0].devices = 2000: must be a whole number >= 1 and <= 1,024.",
        "c.toml:7: nodes[0].levels[0].size = -1: must be a whole number >= 2 and <= 1,000,000.",
        'c.toml:10: devices[0].memory_gb = "big": must be a number >= 0.001 and <= 1,000,000.',
        "'bf61' is not a precision. Did you mean 'bf16'?",
        "c.toml:12: unknown section 'clutser'. There are: nodes, devices, between.",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('device = "H100 SMX"', "c.toml:2: nodes[0].device = 'H100 SMX'"),
        ("devices = 8", "c.toml:2: nodes[0].devices = 8 needs"),
        ("count = 8", "c.toml:1: nodes[0]: give a device"),
        ('device = "Grace"', "device: Grace is a processor: write cpu"),
        ('cpu = "B200"', "cpu: B200 is not a processor: write"),
        ('device = "B200"\nnetwork = "fast"', "nodes[0].network: 'fast' does not"),
        ('cores = 8\n[[nodes.levels]]\nname = "rack"', "the level 'rack' needs gb_per_second"),
        (
            'device = "B200"\n[[nodes.levels]]\nname = "x"\n[[nodes.levels]]\nname = "y"',
            "must rise (given: x all, y all)",
        ),
        (
            'device = "B200"\n[[nodes.levels]]\nname = "x"\ninside = true\nsize = 16',
            "levels[0].size = 16, but a node has 8",
        ),
        ('cores = 1\n[[devices]]\nname = "P"\nkind = "cpu"\nmemory_gb = 1', "the processor 'P' needs cores"),
        (
            'cores = 1\n[[devices]]\nname = "A"\nmemory_gb = 1\n[[devices]]\nname = "A"\nmemory_gb = 1',
            "c.toml:7: devices[1].name: 'A'",
        ),
        (
            'cores = 1\n[[devices]]\nname = "A"\nmemory_gb = 1\nlink = "bus"',
            "c.toml:6: devices[0].link: needs",
        ),
    ],
)
def test_contradictions_are_refused_with_their_line(text: str, told: str, tmp_path: Path) -> None:
    assert told in refusal(tmp_path / "c.toml", f"[[nodes]]\n{text}\n")


def test_a_file_without_machines_and_no_file_at_all_say_how_to_get_one(tmp_path: Path) -> None:
    assert "[[nodes]] with count = 8" in refusal(tmp_path / "c.toml", "")
    assert "[[nodes]] with its keys below it" in refusal(tmp_path / "c.toml", "nodes = 3")
    for text, fact in (
        (str(tmp_path / "none.toml"), r"none.toml[\s\S]*wanma cluster > cluster.toml"),
        (" ", "is empty"),
        ("h100", "'h100' .*\n.*: '1x8 H100 SXM'"),
    ):
        with pytest.raises(JobError, match=fact):
            read_cluster(text)


def test_this_machine_written_as_a_file_reads_back() -> None:
    cluster = discover_node({"CUDA_VISIBLE_DEVICES": ""})
    assert loaded(export_cluster(cluster)) == cluster


def test_a_node_of_two_kinds_of_devices_has_no_file() -> None:
    one, other = (Device("cuda", name, 10**9, {}) for name in "ab")
    with pytest.raises(WanmaError, match=r"several kinds .*: box has a, b"):
        export_cluster(Cluster((NodeGroup("box", 8, 10**10, (one, other)),)))


def test_devices_of_one_name_must_be_the_same_device() -> None:
    (node,) = parse_shorthand("8 B200").nodes
    less = replace(node.devices[0], memory_bytes=180 * 10**9)
    other = replace(node, devices=(less,) * 8)
    assert loaded(export_cluster(Cluster((other,)))) == Cluster((other,))
    with pytest.raises(WanmaError, match="'B200' has different"):
        export_cluster(Cluster((node, other)))


@pytest.mark.parametrize("missing", [{"inside": ()}, {"network": ()}, {"power_watts": None}])
def test_what_is_not_known_of_a_machine_stays_unknown(missing: dict[str, Any]) -> None:
    (node,) = parse_shorthand("2x4 GB200").nodes
    less = Cluster((replace(node, **missing, nics=0, nic_bytes_per_second=None),))
    assert loaded(export_cluster(less)) == less


@pytest.mark.parametrize("kind", CATALOGUE, ids=lambda kind: kind.name)
def test_every_kind_of_the_catalogue_is_written_by_its_name(kind: DeviceKind) -> None:
    cluster = parse_shorthand(f"3x2 {kind.name}, 2x100G")
    text = export_cluster(cluster)
    assert "[[devices]]" not in text
    assert "[[nodes.levels]]" not in text
    assert loaded(text) == cluster


names = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=8
)
gigabytes = st.integers(10**6, 10**12).map(float)
rates = st.dictionaries(st.sampled_from(["fp32", "bf16", "fp8"]), gigabytes)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Any cluster with devices of one kind in a node, in whole bytes and nanoseconds."""
    level_values = st.tuples(names, gigabytes, st.integers(0, 10**6).map(lambda n: n / 1e9))

    def levels(most: int) -> tuple[InterconnectLevel, ...]:
        sizes = sorted(draw(st.sets(st.integers(2, most), max_size=2))) if most >= 2 else []
        found = [InterconnectLevel(*draw(level_values), size) for size in sizes]
        return (*found, InterconnectLevel(*draw(level_values))) if draw(st.booleans()) else tuple(found)

    nodes = []
    for number in range(draw(st.integers(1, 3))):
        memory = draw(st.integers(10**7, 10**12))
        cores = draw(st.integers(1, 999))
        power = st.none() | st.integers(1, 10**4).map(float)
        device = Device(
            draw(st.sampled_from(["cuda", "other"])),
            f"{draw(names)}{number}",
            draw(st.integers(10**7, 10**12)),
            draw(rates),
            draw(st.none() | gigabytes),
            draw(power),
            draw(st.none() | gigabytes),
        )
        cpu = Device(
            "cpu", f"{draw(names)}cpu{number}", memory, draw(rates), draw(st.none() | gigabytes), draw(power)
        )
        devices = (device,) * draw(st.integers(0, 9))
        network, cards = levels(1000), draw(st.integers(0, 64))
        nodes.append(
            NodeGroup(
                draw(names),
                cores,
                memory,
                devices,
                draw(st.integers(1, 10**6)),
                levels(len(devices)) if devices else (),
                network,
                cards if network else 0,
                draw(st.integers(1, 10_000)) * 125e6 if cards and network else None,
                draw(st.sampled_from([None, cpu])),
                draw(power),
                draw(st.none() | st.integers(1, 10**6).map(lambda cents: cents / 100)),
                draw(st.none() | gigabytes),
            )
        )
    between = InterconnectLevel(*draw(level_values)) if draw(st.booleans()) else None
    return Cluster(tuple(nodes), between)


@given(clusters())
def test_a_written_cluster_reads_back_equal(cluster: Cluster) -> None:
    assert loaded(export_cluster(cluster)) == cluster


DOCS = Path(__file__).parents[2] / "docs"


def test_the_reference_lists_every_key_as_it_is_accepted() -> None:
    reference = (DOCS / "reference" / "cluster-file.md").read_text(encoding="utf-8")
    for table in schema_tables(ClusterFile):
        assert markdown_table(table) in reference


def test_the_guide_s_example_is_a_cluster() -> None:
    guide = (DOCS / "guides" / "describe-a-cluster.md").read_text(encoding="utf-8")
    (example,) = re.findall(r'```toml title="cluster.toml"\n(.*?)```', guide, re.DOTALL)
    cluster = loaded(example)
    assert [node.device_count for node in cluster.nodes] == [64, 64]
    assert [level.name for level in cluster.nodes[1].inside] == ["NVLink bridge", "PCIe 4"]
