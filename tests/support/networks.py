"""Networks that fail: namespaces whose cable can be pulled or is long, and a proxy that drops connections."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Cable:
    """Two network namespaces, of which each has an address that the other reaches.

    Attributes:
        names: of the namespaces.
        addresses: in the same order.
    """

    def __init__(self, names: tuple[str, str], addresses: tuple[str, str]) -> None:
        self.names, self.addresses = names, addresses

    def pull(self) -> None:
        """Nothing comes through any more, and neither side is told."""
        ip("-n", self.names[1], "link", "set", "cable1", "down")

    def plug_in(self) -> None:
        ip("-n", self.names[1], "link", "set", "cable1", "up")


@contextmanager
def cable() -> Iterator[Cable]:
    """Two namespaces joined by one cable. Skips the test where the machine makes none."""
    with _namespaces() as names:
        ends = [word for number in (0, 1) for word in (f"cable{number}", "netns", names[number])]
        ip("link", "add", *ends[:3], "type", "veth", "peer", "name", *ends[3:])
        addresses = ("10.91.0.1", "10.91.0.2")
        for number, name in enumerate(names):
            ip("-n", name, "addr", "add", f"{addresses[number]}/24", "dev", f"cable{number}")
            ip("-n", name, "link", "set", f"cable{number}", "up")
        yield Cable(names, addresses)


@contextmanager
def named_hosts(network: Cable, addresses: tuple[str, str] | None = None) -> Iterator[None]:
    """Let this host's name have an address within each namespace; default: the one that the other reaches."""
    folders = [Path("/etc/netns") / name for name in network.names]
    try:
        for folder, address in zip(folders, addresses or network.addresses, strict=True):
            folder.mkdir(parents=True)  # `ip netns exec` lays its files over those of /etc
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
        yield
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def long_cable(delay_seconds: float) -> Iterator[Cable]:
    """Two namespaces whose packets take so long each way."""
    if not Path("/dev/net/tun").exists():
        pytest.skip("a delayed network needs /dev/net/tun")
    with _namespaces() as names:
        relay = subprocess.Popen(
            [sys.executable, __file__, *names, str(delay_seconds)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert relay.stdout is not None
            assert relay.stdout.readline() == "up\n"
            yield Cable(names, ("10.92.0.1", "10.92.0.2"))
        finally:
            relay.kill()
            relay.communicate()


@contextmanager
def _namespaces() -> Iterator[tuple[str, str]]:
    if os.getuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the `ip` command (apt-get install iproute2)")
    names = (f"wanma-test-{os.getpid()}-c", f"wanma-test-{os.getpid()}-d")
    made = subprocess.run(["ip", "netns", "add", names[0]], check=False, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"network namespaces need CAP_NET_ADMIN: {made.stderr.strip()}")
    try:
        ip("netns", "add", names[1])
        for name in names:
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def free_address() -> str:
    """Return HOST:PORT of this machine, with a port that is free now."""
    return f"127.0.0.1:{free_port()}"


class Proxy:
    """Passes connections on to `target`, until it drops them."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._server = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.connections = 0
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.getsockname()[1]}"

    def drop(self) -> None:
        """Reset what goes through now; new connections are passed on."""
        dropped, self._open = self._open, []
        for sock in dropped:
            with contextlib.suppress(OSError):  # its own ends have closed it already
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.shutdown(socket.SHUT_RD)  # wakes the thread that reads it, which closes it

    def close(self) -> None:
        self._server.close()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            self.connections += 1
            self._open += [near, far]
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    @staticmethod
    def _pass_on(one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(1 << 16):
                other.sendall(data)
        except OSError:
            pass
        finally:
            one.close()
            other.close()


def relay(names: tuple[str, str], delay_seconds: float) -> None:
    """Carry packets between two namespaces by TUN devices, each `delay_seconds` later; for ever."""
    addresses = ("10.92.0.1", "10.92.0.2")
    ends = [_tun(names[side], addresses[side], addresses[1 - side]) for side in (0, 1)]
    print("up", flush=True)
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, end, packet = heapq.heappop(waiting)
            os.write(end, packet)
        for end in select.select(ends, [], [], waiting[0][0] - now if waiting else None)[0]:
            packet = os.read(end, 1 << 16)
            count += 1
            heapq.heappush(waiting, (time.monotonic() + delay_seconds, count, ends[end == ends[0]], packet))


def _tun(namespace: str, address: str, peer: str) -> int:
    """A device in a namespace, as a descriptor from which its packets are read."""
    set_namespace = ctypes.CDLL(None, use_errno=True).setns
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    assert set_namespace(there, 0x40000000) == 0, os.strerror(ctypes.get_errno())
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, 0x400454CA, struct.pack("16sH22s", b"cable", 0x0001 | 0x1000, b""))  # TUNSETIFF
    ip("addr", "add", address, "peer", peer, "dev", "cable")
    ip("link", "set", "cable", "up", "mtu", "1400")
    assert set_namespace(here, 0x40000000) == 0
    os.close(here)
    os.close(there)
    return device


if __name__ == "__main__":
    relay((sys.argv[1], sys.argv[2]), float(sys.argv[3]))
