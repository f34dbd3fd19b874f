"""Network cards of this node and their speeds, as Linux reports: InfiniBand and RoCE first, else Ethernet."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from wanma.hardware.cluster_file.node_builder import MAX_NIC_GIGABITS, MAX_NICS, Nics
from wanma.job.run.resource_limits import ROOT


def detect_nics(root: Path = ROOT) -> Nics | None:
    """Return the fastest cards that are up, since a run uses those; None: no card reports its speed.

    Args:
        root: root of the file system that holds `sys`.
    """
    rates = list(_rdma_speeds(root)) or list(_ethernet_speeds(root))
    valid_rates = [rate for rate in rates if 0 < rate <= MAX_NIC_GIGABITS * 1e9]
    if not valid_rates:
        return None
    fastest = max(valid_rates)
    return Nics(min(valid_rates.count(fastest), MAX_NICS), fastest)


def _rdma_speeds(root: Path) -> Iterator[float]:
    """Yield the bits per second of every active InfiniBand or RoCE port: '200 Gb/sec (4X HDR)'."""
    for port in root.glob("sys/class/infiniband/*/ports/*"):
        rate = re.match(r"([\d.]+) Gb/sec", _read(port / "rate"))
        if rate and "ACTIVE" in _read(port / "state"):
            yield float(rate[1]) * 1e9


def _ethernet_speeds(root: Path) -> Iterator[float]:
    """Yield the bits per second of every physical Ethernet card that is up; bridges have no device."""
    for interface in root.glob("sys/class/net/*"):
        speed = _read(interface / "speed").strip()  # megabits; -1 when unknown, unreadable when down
        if (interface / "device").exists() and speed.isdigit():
            yield int(speed) * 1e6


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
