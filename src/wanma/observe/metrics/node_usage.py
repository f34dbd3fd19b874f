"""Use of one node: processors, memory, disks, network and InfiniBand, from the kernel's counters."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from wanma.job.run.resource_limits import memory_left_bytes, usable_memory_bytes
from wanma.observe.metrics.process_usage import read_counters

VIRTUAL_INTERFACES = ("lo", "veth", "cali", "lxc", "cni", "flannel", "docker", "br-", "virbr", "tap")
"""Beginnings of the names of interfaces within a node, of which each container adds one of a random name."""
INFINIBAND_WORD_BYTES = 4
"""Bytes for one count of an InfiniBand port's data counters (InfiniBand specification, PortCounters)."""


def read_node_usage(folder: Path, pressure: Path = Path("/proc/pressure/io")) -> dict[str, Any]:
    """Read the present use of this node, as a record of logs/node-N.jsonl has it.

    Args:
        folder: run directory, whose file system is measured.
        pressure: file of the kernel with the stalls of programs for disks.

    Returns:
        `cpu_seconds` (busy time of all processors since the boot), `cpus`, `memory_bytes` and
        `memory_available_bytes` (of the node, or of a container with a limit), `disk_bytes`,
        `disk_free_bytes`, `disk_read_bytes`, `disk_written_bytes`, `disk_wait_seconds` (time since the boot
        in which some program waited for a disk), and `interfaces`: received and sent bytes by name. What the
        system does not report is missing.
    """
    import psutil

    usage: dict[str, Any] = {"cpus": psutil.cpu_count() or 1}
    times = psutil.cpu_times()
    # The kernel counts guests' time in user time, too; waiting for a disk is no work.
    usage["cpu_seconds"] = times.user + times.nice + times.system + times.irq + times.softirq
    memory = psutil.virtual_memory()
    limit, left = usable_memory_bytes(), memory_left_bytes()  # a container's limit kills before the node's
    usage["memory_bytes"] = min(memory.total, limit)
    usage["memory_available_bytes"] = memory.available if left is None else min(memory.available, left)
    with contextlib.suppress(OSError):
        disk = psutil.disk_usage(str(folder))
        usage |= {"disk_bytes": disk.total, "disk_free_bytes": disk.free}
    with contextlib.suppress(OSError, RuntimeError):  # containers may hide the disks
        counters = psutil.disk_io_counters()
        if counters is not None:
            usage |= {"disk_read_bytes": counters.read_bytes, "disk_written_bytes": counters.write_bytes}
    with contextlib.suppress(OSError, ValueError):  # not every kernel counts them
        # The first line has the stalls of some programs, in microseconds; iowait would need idle processors.
        some = pressure.read_text().partition("\n")[0]
        usage["disk_wait_seconds"] = int(some.rpartition("total=")[2]) / 1e6
    usage["interfaces"] = {
        name: (card.bytes_recv, card.bytes_sent)
        for name, card in psutil.net_io_counters(pernic=True).items()
        if not name.startswith(VIRTUAL_INTERFACES)
    } | read_infiniband()
    return usage


def read_infiniband(folder: Path = Path("/sys/class/infiniband")) -> dict[str, tuple[int, int]]:
    """Return received and sent bytes of each InfiniBand port, by 'DEVICE/PORT'."""
    ports = {}
    for port in sorted(folder.glob("*/ports/*")):
        words = read_counters(port / "counters", "port_rcv_data", "port_xmit_data")
        if words is not None:
            received, sent = (INFINIBAND_WORD_BYTES * count for count in words)
            ports[f"{port.parts[-3]}/{port.name}"] = (received, sent)
    return ports
