"""Two nodes of this machine joined by a slow link: its rate, its ends, and machines that cannot have one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from wanma.bench.programs import limited_link
from wanma.bench.programs.limited_link import ADDRESSES, missing_for_link, require_link
from wanma.job.errors import WanmaError

MEGABITS = 40
BYTES = 2 << 20
CONNECT = f"""
import socket, time
if "{{node}}" == "0":
    connection, _ = socket.create_server(("{ADDRESSES[0]}", 4000)).accept()
while "{{node}}" == "1":
    try:
        connection = socket.create_connection(("{ADDRESSES[0]}", 4000))
        break
    except OSError:
        time.sleep(0.05)
began = time.monotonic()
if "{{node}}" == "0":
"""
SEND = f"""{CONNECT}
    received = 0
    while data := connection.recv(1 << 16):
        received += len(data)
    print(received, time.monotonic() - began)
else:
    connection.sendall(bytes({BYTES}))
"""
ECHO = f"""{CONNECT}
    connection.sendall(connection.recv(1))
else:
    connection.sendall(b"1")
    connection.recv(1)
    print(time.monotonic() - began)
"""


def run_on_nodes(program: str, *delay: str) -> subprocess.CompletedProcess[str]:
    module = "wanma.bench.programs.limited_link"
    command = [sys.executable, "-P", "-m", module, str(MEGABITS), *delay, "--", sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.skipif(bool(missing_for_link()), reason="needs root, ip and tc")
def test_the_link_is_not_faster_than_its_rate() -> None:
    ran = run_on_nodes(SEND)
    assert ran.returncode == 0, ran.stderr
    received, seconds = ran.stdout.split()
    assert int(received) == BYTES
    assert float(seconds) >= 0.9 * 8 * (BYTES - limited_link.BURST_BYTES) / (MEGABITS * 1e6)


@pytest.mark.skipif(bool(missing_for_link(0.05)), reason="needs root, ip, tc and tun")
def test_a_packet_takes_the_delay_each_way() -> None:
    ran = run_on_nodes(ECHO, "0.05")
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) >= 0.1


@pytest.mark.skipif(bool(missing_for_link()), reason="needs root, ip and tc")
def test_the_exit_code_is_that_of_the_node_that_failed() -> None:
    assert run_on_nodes("raise SystemExit(7 * int('{node}'))").returncode == 7


def test_a_machine_without_root_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(WanmaError, match=r"link_megabits_per_second.*root") as refused:
        require_link()
    assert "--engine" in refused.value.hint
