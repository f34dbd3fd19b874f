"""Ports for the ranks of a script: free, different, and never those of outgoing connections."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from wanma.elastic.transport import rank_ports
from wanma.elastic.transport.rank_ports import choose_rank_ports, list_candidate_ports
from wanma.job.errors import WanmaError


def test_ports_are_free_different_and_outside_the_range_of_connections(tmp_path: Path) -> None:
    ports = choose_rank_ports("127.0.0.1", 20)
    assert len(set(ports)) == 20
    assert set(ports) <= set(list_candidate_ports(Path("/proc/sys/net/ipv4/ip_local_port_range")))
    for port in ports:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", port))


def test_the_kernels_ports_of_connections_are_left_out(tmp_path: Path) -> None:
    kernel_file = tmp_path / "range"
    kernel_file.write_text("10010\t65000\n")
    assert list_candidate_ports(kernel_file) == [*range(10_000, 10_010), *range(65_001, 65_536)]
    kernel_file.write_text("1024\t65535\n")
    assert list_candidate_ports(kernel_file) == range(10_000, 65_536), "any is better than none"


def test_a_port_that_another_process_has_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        taken = sock.getsockname()[1]
        monkeypatch.setattr(rank_ports, "list_candidate_ports", lambda _file: [taken])
        with pytest.raises(WanmaError, match=r"1 ports .* at 127\.0\.0\.1"):
            choose_rank_ports("127.0.0.1", 1)
