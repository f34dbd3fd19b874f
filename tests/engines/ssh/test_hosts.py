"""Hosts from a job's list and from inventory files."""

from __future__ import annotations

from pathlib import Path

import pytest

from wanma.engines.hosts.connections import Host
from wanma.engines.ssh.hosts import list_hosts, parse_host, read_inventory
from wanma.job.errors import JobError
from wanma.job.sections.engines import SshSection


@pytest.mark.parametrize(
    ("text", "destination", "port", "name"),
    [
        ("gpu1", "gpu1", None, "gpu1"),
        ("me@gpu1:2222", "me@gpu1", 2222, "gpu1"),
        ("10.0.0.1:22", "10.0.0.1", 22, "10.0.0.1"),
        ("me@[fd00::1]:22", "me@fd00::1", 22, "fd00::1"),
        ("[fe80::1%eth0]", "fe80::1%eth0", None, "fe80::1%eth0"),
    ],
)
def test_host(text: str, destination: str, port: int | None, name: str) -> None:
    host = parse_host(text, "cluster.ssh.hosts")
    assert (host.text, host.destination, host.port, host.name) == (text, destination, port, name)


@pytest.mark.parametrize("text", ["", "-oProxyCommand=evil", "me@-oProxyCommand=x", "a b", "gpu1:", "gpu1:0"])
def test_a_text_that_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(JobError, match=r"cluster\.ssh\.hosts"):
        parse_host(text, "cluster.ssh.hosts")


def test_a_file_with_one_host_a_line(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# GPU nodes\ngpu1\n\nme@gpu2:2222  # the new one\n; old\n")
    assert [host.destination for host in read_inventory(tmp_path / "hosts")] == ["gpu1", "me@gpu2"]


def test_a_hostfile_of_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("worker-1 slots=4\nme@worker-2 slots=4\n")
    assert [host.destination for host in read_inventory(tmp_path / "hosts")] == ["worker-1", "me@worker-2"]


def test_an_inventory_of_ansible(tmp_path: Path) -> None:
    (tmp_path / "hosts.ini").write_text(
        """
        head ansible_host=10.0.0.9
        [gpu]
        gpu[01:03]
        gpu04 ansible_port=2200 ansible_user='her' ansible_host="10.0.0.4"
        [gpu:vars]
        ansible_user=me
        ansible_port = 2222
        [all:vars]
        ansible_ssh_user=root
        [cluster:children]
        gpu
        [others]
        gpu01
        """
    )
    assert read_inventory(tmp_path / "hosts.ini") == [
        Host("head", "root@10.0.0.9", None),
        Host("gpu01", "me@gpu01", 2222),
        Host("gpu02", "me@gpu02", 2222),
        Host("gpu03", "me@gpu03", 2222),
        Host("gpu04", "her@10.0.0.4", 2200),
    ]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "has no hosts"),
        ({"hosts": ["gpu1", "gpu1"]}, "'gpu1' is listed twice"),
        ({"hosts": ["gpu1"], "inventory": "hosts"}, "both list hosts"),
        ({"inventory": "nowhere.ini"}, r"nowhere\.ini' cannot be read: No such file"),
    ],
)
def test_lists_of_hosts_that_cannot_be_meant(tmp_path: Path, keys: dict[str, object], message: str) -> None:
    with pytest.raises(JobError, match=message):
        list_hosts(SshSection.model_validate(keys), tmp_path)


def test_a_line_that_is_no_host_is_named(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("gpu1\n-oProxyCommand=evil\n")
    with pytest.raises(JobError, match=r"hosts, line 2: '-oProxyCommand=evil' is no host"):
        read_inventory(tmp_path / "hosts")
