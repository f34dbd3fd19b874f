"""Limits of this process on the node: CPU affinity, cgroup quotas (v1 and v2), memory limits. Torch-free.

`root` is the root of the file system that holds `proc` and `sys`; tests give a made-up one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def usable_cores(root: Path = ROOT) -> int:
    """Return the cores this process may keep busy: affinity, cut by the tightest cgroup quota; at least 1.

    A quota is rounded down: with one thread more than the quota pays for, all threads are throttled.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in _cgroup_folders(root, "cpu") if (quota := _cpu_quota(folder)) is not None]
    return max(1, min([cores, *(int(quota) for quota in quotas)]))


def usable_memory_bytes(root: Path = ROOT) -> int:
    """Return the bytes of host memory this process may use: the node's, cut by the tightest cgroup limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [
        limit for folder in _cgroup_folders(root, "memory") if (limit := _memory_limit(folder)) is not None
    ]
    return min([total, *limits])


def memory_left_bytes(root: Path = ROOT) -> int | None:
    """Return the bytes that this process's control groups still allow; None: they have no limit.

    Cached files that nobody has used lately do not count: the kernel drops them before it kills.
    """
    left = []
    for folder in _cgroup_folders(root, "memory"):
        used = _read(folder / "memory.current").strip() or _read(folder / "memory.usage_in_bytes").strip()
        limit = _memory_limit(folder)
        if limit is not None and used:
            rows = (line.split() for line in _read(folder / "memory.stat").splitlines())
            sizes = {row[0]: int(row[1]) for row in rows if len(row) == 2}
            cached = sizes.get("total_inactive_file", sizes.get("inactive_file", 0))
            left.append(max(limit - int(used) + cached, 0))
    return min(left, default=None)


def count_oom_kills(root: Path = ROOT) -> int | None:
    """Return the number of kills by the kernel's out-of-memory killer so far; None: not reported.

    Counted in this process's control group, or, where that has no count, on the whole node.
    """
    for folder in _cgroup_folders(root, "memory"):
        for name in ("memory.events", "memory.oom_control"):
            if (count := _oom_kills(folder / name)) is not None:
                return count
    return _oom_kills(root / "proc/vmstat")


def cpu_model(root: Path = ROOT) -> str:
    """Return the processor's name as /proc/cpuinfo has it, else the architecture."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return os.uname().machine


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the control-group folders that bind this process, its own first, then its ancestors.

    Inside a container the path that the kernel names may not exist below the mount; then the mount
    itself is the container's group, which the walk upward reaches anyway.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:depth])


def _cpu_quota(folder: Path) -> float | None:
    """Return the cores that the group's quota pays for; None: no quota."""
    if fields := _read(folder / "cpu.max").split():
        quota, period = fields[0], fields[1]
    else:
        quota = _read(folder / "cpu.cfs_quota_us").strip()
        period = _read(folder / "cpu.cfs_period_us").strip()
    if quota in ("", "max", "-1") or not period:
        return None
    return int(quota) / int(period)


def _memory_limit(folder: Path) -> int | None:
    text = _read(folder / "memory.max").strip() or _read(folder / "memory.limit_in_bytes").strip()
    return None if text in ("", "max") else int(text)


def _oom_kills(path: Path) -> int | None:
    """Return the value of the line 'oom_kill N'; None: no such line."""
    fields = (line.split() for line in _read(path).splitlines())
    return next((int(field[1]) for field in fields if field[:1] == ["oom_kill"]), None)


def _read(path: Path) -> str:
    """Return the file's text; empty where this system has no such file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
