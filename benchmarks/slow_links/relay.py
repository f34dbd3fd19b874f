"""Relay that delays packets between two network namespaces, as a long cable does.

    python -m benchmarks.slow_links.relay NAMESPACE OTHER ADDRESS OTHER_ADDRESS DELAY_SECONDS

It runs as root until it is killed, and prints 'up' when both ends exist. Packets are large, so that carrying
them takes little of the cores that train. Kernels that have netem need no relay; many a guest has none.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import struct
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.slow_links.interface import NAME

PACKET_BYTES = 60_000
"""Maximum bytes of a packet; TCP at 1 Gbit/s has some 2,000 per second."""
QUEUE_PACKETS = 1_000

_NEW_NETWORK = 0x40000000  # sched.h: CLONE_NEWNET
_SET_UP_DEVICE = 0x400454CA  # linux/if_tun.h: TUNSETIFF
_TUN, _NO_PACKET_INFORMATION = 0x0001, 0x1000


def main() -> None:
    names, addresses, delay = sys.argv[1:3], sys.argv[3:5], float(sys.argv[5])
    ends = [end_in(name, addresses[side], addresses[1 - side]) for side, name in enumerate(names)]
    print("up", flush=True)
    carry(ends, delay)


def carry(ends: list[int], delay_seconds: float) -> None:
    """Carry packets from each end to the other, forever."""
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, end, packet = heapq.heappop(waiting)
            os.write(end, packet)
        readable, _, _ = select.select(ends, [], [], max(waiting[0][0] - now, 0.0) if waiting else None)
        for end in readable:
            packet = os.read(end, PACKET_BYTES + 1_000)
            count += 1  # packets of one moment keep their order
            due = time.monotonic() + delay_seconds
            heapq.heappush(waiting, (due, count, ends[end == ends[0]], packet))


def end_in(namespace: str, address: str, peer: str) -> int:
    """Create a device in a namespace; return a descriptor from which its packets are read."""
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(Path("/var/run/netns") / namespace, os.O_RDONLY)
    _enter(there)
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(
        device, _SET_UP_DEVICE, struct.pack("16sH22s", NAME.encode(), _TUN | _NO_PACKET_INFORMATION, b"")
    )
    for words in (
        ("addr", "add", address, "peer", peer, "dev", NAME),
        ("link", "set", NAME, "up", "mtu", str(PACKET_BYTES), "txqueuelen", str(QUEUE_PACKETS)),
    ):
        subprocess.run(["ip", *words], check=True)
    _enter(here)
    os.close(here)
    os.close(there)
    return device


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _NEW_NETWORK) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    main()
