"""Files of the Linux kernel that tell the state of this machine: CPU time, clock, temperature, traffic.

A reading is None where the kernel does not report it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path

from wanma.observe.metrics.process_usage import read_network_bytes

CPU_SENSORS = frozenset({"coretemp", "k10temp", "zenpower", "cpu_thermal"})
"""Drivers of CPU temperatures in /sys/class/hwmon."""
CPU_ZONES = ("x86_pkg_temp", "cpu", "soc")
"""Beginnings of the types of CPU zones in /sys/class/thermal."""
VIRTUAL_DISKS = ("loop", "ram", "zram", "dm-", "md")
"""Beginnings of block devices that store nothing themselves: their traffic is also that of another device."""
SECTOR_BYTES = 512
"""Unit of the kernel's disk statistics, whatever the device has."""


class MachineFiles:
    """Reader of the files below `root`."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._cpus = root / "sys/devices/system/cpu"

    def busy_seconds_by_cpu(self) -> dict[int, float]:
        """Return the busy seconds of each CPU since boot; empty if they are unknown."""
        ticks = os.sysconf("SC_CLK_TCK")
        busy = {}
        for line in (_text(self._root / "proc/stat") or "").splitlines():
            name, *fields = line.split()
            if name.startswith("cpu") and name != "cpu":
                busy[int(name[3:])] = sum(int(fields[index]) for index in (0, 1, 2, 5, 6, 7)) / ticks
        return busy

    def clock_hertz(self, cpus: Collection[int]) -> float | None:
        """Return the mean clock of some CPUs, from cpufreq, else from /proc/cpuinfo."""
        paths = (self._cpus / f"cpu{cpu}/cpufreq/scaling_cur_freq" for cpu in cpus)
        clocks = [kilohertz * 1e3 for kilohertz in _numbers(paths)]
        if not clocks:
            by_cpu = self._cpuinfo_hertz()
            clocks = [by_cpu[cpu] for cpu in cpus if cpu in by_cpu]
        return sum(clocks) / len(clocks) if clocks else None

    def celsius(self) -> float | None:
        """Return the highest temperature of a CPU sensor."""
        found = [
            number
            for folder in sorted((self._root / "sys/class/hwmon").glob("hwmon*"))
            if (_text(folder / "name") or "").strip() in CPU_SENSORS
            for number in _numbers(sorted(folder.glob("temp*_input")))
        ]
        if not found:
            found = _numbers(
                zone / "temp"
                for zone in sorted((self._root / "sys/class/thermal").glob("thermal_zone*"))
                if (_text(zone / "type") or "").startswith(CPU_ZONES)
            )
        return max(found) / 1e3 if found else None

    def throttle_count(self) -> int | None:
        """Return how often CPUs and packages have reduced their clock because of heat, since boot."""
        counts = _numbers(
            path
            for name in ("core_throttle_count", "package_throttle_count")
            for path in self._cpus.glob(f"cpu*/thermal_throttle/{name}")
        )
        return sum(counts) if counts else None

    def network_bytes(self) -> int | None:
        """Return the bytes received and sent on all interfaces but the loopback."""
        folder = self._root / "sys/class/net"
        names = [path.name for path in sorted(folder.glob("*")) if path.name != "lo"]
        found = [both for name in names if (both := read_network_bytes(name, folder)) is not None]
        return sum(received + sent for received, sent in found) if found else None

    def disk_bytes(self) -> int | None:
        """Return the bytes read and written on block devices (Documentation/block/stat.rst of Linux)."""
        disks = sorted((self._root / "sys/block").glob("*"))
        found = [_text(disk / "stat") for disk in disks if not disk.name.startswith(VIRTUAL_DISKS)]
        rows = [text.split() for text in found if text]
        return sum(int(row[2]) + int(row[6]) for row in rows) * SECTOR_BYTES if rows else None

    def _cpuinfo_hertz(self) -> dict[int, float]:
        clocks, cpu = {}, -1
        for line in (_text(self._root / "proc/cpuinfo") or "").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "processor":
                cpu = int(value)
            elif name.strip() == "cpu MHz":
                clocks[cpu] = float(value) * 1e6
        return clocks


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _numbers(paths: Iterable[Path]) -> list[int]:
    """Return the whole numbers in those of the files that can be read."""
    return [int(text) for path in paths if (text := _text(path)) and text.strip().lstrip("-").isdecimal()]
