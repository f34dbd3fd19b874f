"""Facts of hosts as the planner's cluster: kinds, clocks, disks and versions."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from wanma.api.engines.submission import take_nodes
from wanma.data.cache.prepared_entries import mark_prepared_entries, marks_of_remote_entries
from wanma.engines.hosts.connections import Host, Reply
from wanma.engines.ssh import host_probe
from wanma.engines.ssh.discovery import ProbedHosts, make_engine_cluster, probe_hosts, require_hosts
from wanma.engines.ssh.hosts import parse_host
from wanma.engines.ssh.placement import candidate_addresses
from wanma.hardware.discovery.node import discover_node
from wanma.job.errors import WanmaError
from wanma.job.sections.data import DataSection

VERSIONS = {"wanma": None, "torch": None}


class Hosts:
    """Connections to hosts that answer at once.

    Args:
        answers: facts of each host that differ from the usual ones.
    """

    def __init__(self, **answers: dict[str, Any]) -> None:
        import importlib.metadata

        self._answers = answers
        self._versions = {name: importlib.metadata.version(name) for name in VERSIONS}

    def ask(self, host: Host, *_: object, **__: object) -> Reply:
        facts = {
            "hostname": host.name,
            "python": platform.python_version(),
            "executable": "/usr/bin/python3",
            "versions": self._versions,
            "folder": "/home/me/.wanma",
            "free_bytes": 1 << 40,
            "cluster": discover_node({}).to_json(),
            "discovery_problem": "",
            "data": [],
            **self._answers[host.name],
        }
        facts["time"] = time.time() + facts.get("clock", 0.0)
        if "versions" in self._answers[host.name]:
            facts["versions"] = {**self._versions, **self._answers[host.name]["versions"]}
        return Reply(facts)

    def ask_all(self, questions: dict[Host, Any]) -> tuple[dict[Host, Reply], list[Any]]:
        return {host: question() for host, question in questions.items()}, []

    def probe(self, data: Mapping[str, str] | None = None) -> ProbedHosts:
        hosts = [parse_host(name, "test") for name in self._answers]
        return probe_hosts(self, hosts, "~/.wanma", data=data)  # type: ignore[arg-type]


def node(cores: int) -> dict[str, Any]:
    value = discover_node({}).to_json()
    value["nodes"][0]["cores"] = cores
    return value


def test_hosts_of_a_kind_are_one_group_in_order() -> None:
    found = make_engine_cluster(
        Hosts(a={"cluster": node(8)}, b={"cluster": node(64)}, c={"cluster": node(8)}).probe(), 3
    )
    assert [(group.count, group.cores, group.hosts) for group in found.cluster.nodes] == [
        (2, 8, ("a", "c")),
        (1, 64, ("b",)),
    ]
    sizes = {}
    for count in (1, 2, 3, 5):
        cluster = take_nodes(found.cluster, count)
        sizes[count] = [group.count for group in cluster.nodes]
    assert sizes == {1: [1], 2: [2], 3: [2, 1], 5: [2, 3]}


def test_hosts_that_have_the_data_are_taken_first() -> None:
    answers = {"a": {}, "b": {"data": ["/data/x"]}, "c": {"data": ["/data/x", "/data/y*"]}, "d": {}}
    found = make_engine_cluster(Hosts(**answers).probe({"/data/x": "/data/x", "/data/y*": "/data/y*"}), 2)
    assert [group.hosts for group in found.cluster.nodes] == [("c", "b", "a", "d")]
    assert [note.partition(":")[0] for note in found.notes] == ["a, d lack /data/x", "a, b, d lack /data/y*"]
    (note,) = Hosts(a={}, b={}).probe({"/data/z": "/data/z"}).notes
    assert note.startswith("no host has /data/z")


def test_hosts_that_have_prepared_remote_data_are_taken_first() -> None:
    data = {"s3://bucket/x": "~/.cache/wanma/entries/0", "s3://bucket/y": "~/.cache/wanma/entries/1"}
    found = make_engine_cluster(Hosts(a={}, b={"data": ["s3://bucket/x"]}).probe(data), 1)
    assert [group.hosts for group in found.cluster.nodes] == [("b", "a")]
    (note,) = found.notes
    assert note.startswith("a lack s3://bucket/x")


def test_a_host_has_what_lies_at_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    section = DataSection(path=["s3://bucket/x", "/data/y"])
    data = marks_of_remote_entries(section)
    assert list(data) == ["s3://bucket/x"]
    facts: list[dict[str, Any]] = []
    request = {"folder": str(tmp_path), "has_hardware": False, "data": {**data, "here": f"{tmp_path}/.c*"}}
    host_probe.main(request, facts.append)
    mark_prepared_entries(section)
    host_probe.main(request, facts.append)
    assert [one["data"] for one in facts] == [[], ["s3://bucket/x", "here"]]


def test_a_clock_that_is_wrong_and_a_disk_that_is_nearly_full_are_named() -> None:
    notes = (
        Hosts(a={"clock": 40.0}, b={"clock": -90.0}, c={"clock": 1.0, "free_bytes": 5 << 20}).probe().notes
    )
    assert "the clock of a is 40 s ahead of this machine's" in notes[0]
    assert "the clock of b is 90 s behind this machine's" in notes[1]
    assert notes[2].startswith("c: 5.0 MiB are free for /home/me/.wanma")
    assert len(notes) == 3


@pytest.mark.parametrize(
    ("facts", "message", "way_out"),
    [
        ({"python": "3.9.2"}, "/usr/bin/python3 is Python 3.9.2, and this is", "cluster.ssh.python"),
        (
            {"versions": {"torch": None}},
            "torch is not installed for /usr/bin/python3",
            "-m pip install torch==",
        ),
        ({"versions": {"torch": "1.0.0"}}, "torch 1.0.0 is installed", "the same version"),
        ({"cluster": None, "discovery_problem": "no driver"}, "cannot be read: no driver", "wanma doctor"),
    ],
)
def test_a_host_that_cannot_be_used(facts: dict[str, Any], message: str, way_out: str) -> None:
    probed = Hosts(a={}, b=facts).probe()
    with pytest.raises(WanmaError) as error:
        require_hosts(probed, 2)
    assert error.value.message.startswith("b: ")
    assert message in error.value.message
    assert way_out in error.value.hint
    assert make_engine_cluster(probed, 1).notes[0].startswith("left out: b: ")


def test_a_build_of_the_same_torch_is_the_same_version() -> None:
    import importlib.metadata

    version = importlib.metadata.version("torch").partition("+")[0]
    assert Hosts(a={"versions": {"torch": f"{version}+cu130"}}).probe().failures == ()


def test_addresses_of_the_first_host_the_best_first() -> None:
    facts = {
        "reached_at": "192.168.0.5",
        "addresses": [["eth0", "10.0.0.1"], ["ib0", "10.1.0.1"], ["lo", "127.0.0.1"]],
    }
    host = parse_host("a", "test")
    assert candidate_addresses(facts, host, None) == ["192.168.0.5", "10.0.0.1", "10.1.0.1", "127.0.0.1"]
    assert candidate_addresses(facts, host, "ib0") == ["10.1.0.1"]
    with pytest.raises(WanmaError, match=r"no such interface(.|\n)*eth0, ib0, lo"):
        candidate_addresses(facts, host, "eth7")
