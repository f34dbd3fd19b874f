"""Network position of a node, from its sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from wanma.hardware.cluster_file.export import export_cluster
from wanma.hardware.cluster_file.host_list import expand_host_list, expand_host_lists
from wanma.hardware.cluster_file.reader import load_cluster_file
from wanma.hardware.discovery.topology_address import TopologyAddress, resolve_topology_address
from wanma.job.cluster import Cluster
from wanma.job.errors import JobError
from wanma.job.sections.cluster import ClusterSection

SLURM = {"SLURM_TOPOLOGY_ADDR": "s0.s4.node7"}
FILE = """
[[nodes]]
name = "old"
cores = 8
hosts = ["a[01-03]", "b1"]

[[nodes]]
cores = 16
count = 2
hosts = ["gpu2.lab", "gpu1.lab"]
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "cluster.toml"
    path.write_text(FILE)
    return str(path)


def test_the_users_word_counts_first_then_the_cluster_file_then_slurm(file: str) -> None:
    named = ClusterSection(file=file, topology_address="rack-3/switch-1")
    assert resolve_topology_address(named, SLURM, "a02") == TopologyAddress(
        "rack-3/switch-1", "cluster.topology_address"
    )
    listed = resolve_topology_address(ClusterSection(file=file), SLURM, "a02")
    assert listed == TopologyAddress("0/1", f"number 2 of old's hosts in {file}")
    assert resolve_topology_address(ClusterSection(), SLURM) == TopologyAddress(
        "s0.s4.node7", "SLURM_TOPOLOGY_ADDR"
    )
    assert str(resolve_topology_address(ClusterSection(), {})) == "unknown"


def test_hosts_are_numbered_in_the_order_of_the_file_whatever_the_domain(file: str) -> None:
    section = ClusterSection(file=file)
    names = ["a01", "a03.cluster.example", "b1", "gpu2", "gpu1.lab"]
    assert [resolve_topology_address(section, {}, name).path for name in names] == [
        "0/0",
        "0/2",
        "0/3",
        "1/0",
        "1/1",
    ]


def test_a_machine_that_the_file_does_not_list_is_told(file: str) -> None:
    with pytest.raises(JobError, match="this node, c9, is missing in the hosts") as refused:
        resolve_topology_address(ClusterSection(file=file), {}, "c9")
    assert "cluster.topology_address" in refused.value.hint


def test_a_file_without_hosts_says_nothing_of_places(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("[[nodes]]\ncores = 8\ncount = 2\n")
    assert resolve_topology_address(ClusterSection(file=str(path)), SLURM, "any").path == "s0.s4.node7"
    assert resolve_topology_address(ClusterSection(file="2x8 H100 SXM, 4x100G"), {}, "any").path == ""


def test_hosts_count_the_machines_and_survive_being_written_and_read(file: str, tmp_path: Path) -> None:
    cluster = load_cluster_file(Path(file))
    assert [node.count for node in cluster.nodes] == [4, 2]
    assert cluster.nodes[0].hosts == ("a01", "a02", "a03", "b1")
    again = tmp_path / "again.toml"
    again.write_text(export_cluster(cluster))
    assert load_cluster_file(again) == cluster
    assert Cluster.from_json(cluster.to_json()) == cluster


@pytest.mark.parametrize(
    ("hosts", "problem"),
    [
        ('count = 3\nhosts = ["a[1-2]"]', "nodes[0].hosts: names 2 hosts, but"),
        ('hosts = ["a[1-2]", "a2"]', "nodes[0].hosts: names 'a2' twice"),
        ('hosts = ["a[2-1]"]', "'2-1' is neither a number nor a range"),
        ('hosts = ["a b"]', "'a b' is neither a host name"),
    ],
)
def test_wrong_hosts_are_refused_with_their_line(hosts: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(f"[[nodes]]\ncores = 8\n{hosts}\n")
    with pytest.raises(JobError) as refused:
        load_cluster_file(path)
    assert problem.removeprefix("nodes[0].hosts: ") in str(refused.value)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node7", ["node7"]),
        ("node[08-10]", ["node08", "node09", "node10"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("gpu[1].lab.example", ["gpu1.lab.example"]),
    ],
)
def test_lists_of_machines_are_written_as_slurm_writes_them(text: str, names: list[str]) -> None:
    assert list(expand_host_list(text)) == names


def test_several_lists_are_separated_by_commas_outside_of_brackets() -> None:
    text = "n[1-3,7],gpu-[01-02]-ib,login"
    assert list(expand_host_lists(text)) == ["n1", "n2", "n3", "n7", "gpu-01-ib", "gpu-02-ib", "login"]
