"""Delay of the packets between two network namespaces, as on a long cable.

Kernels with netem need none of this; many a guest has no netem. Packets are large, so that carrying them
takes little of the cores that train.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import select
import struct
import subprocess
import threading
import time
from collections.abc import Sequence

TUN = "/dev/net/tun"
PACKET_BYTES = 60_000
"""Maximum bytes of a packet; TCP at 1 Gbit/s has some 2,000 per second."""
QUEUE_PACKETS = 1_000
NEW_NETWORK = 0x40000000  # sched.h: CLONE_NEWNET
_SET_UP_DEVICE = 0x400454CA  # linux/if_tun.h: TUNSETIFF
_TUN, _NO_PACKET_INFORMATION = 0x0001, 0x1000


def join_with_delay(processes: Sequence[int], interface: str, seconds: float) -> None:
    """Create an interface in the network of each of two processes; a thread carries packets between them.

    Args:
        seconds: delay of each packet, each way.

    Raises:
        OSError: this user may not create it.
    """
    ends = [_open_end(process, interface) for process in processes]
    threading.Thread(target=_carry, args=(ends, seconds), daemon=True).start()


def _carry(ends: Sequence[int], seconds: float) -> None:
    """Carry packets from each end to the other, until one is gone."""
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    with contextlib.suppress(OSError):
        while True:
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, _, end, packet = heapq.heappop(waiting)
                os.write(end, packet)
            timeout = max(waiting[0][0] - now, 0.0) if waiting else None
            # Exact to a microsecond, poll only to a millisecond; the few descriptors are below 1,024.
            readable, _, _ = select.select(ends, [], [], timeout)
            for end in readable:
                packet = os.read(end, PACKET_BYTES + 1_000)
                count += 1  # packets of one moment keep their order
                heapq.heappush(waiting, (time.monotonic() + seconds, count, ends[end == ends[0]], packet))


def _open_end(process: int, interface: str) -> int:
    """Create the interface in the network of a process; return a descriptor of its packets."""
    here, there = (os.open(f"/proc/{name}/ns/net", os.O_RDONLY) for name in ("self", process))
    try:
        _enter(there)
        device = os.open(TUN, os.O_RDWR)
        request = struct.pack("16sH22s", interface.encode(), _TUN | _NO_PACKET_INFORMATION, b"")
        fcntl.ioctl(device, _SET_UP_DEVICE, request)
        sizes = ["mtu", str(PACKET_BYTES), "txqueuelen", str(QUEUE_PACKETS)]
        subprocess.run(["ip", "link", "set", interface, *sizes], check=True)
        return device
    finally:
        _enter(here)
        os.close(here)
        os.close(there)


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, NEW_NETWORK) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
