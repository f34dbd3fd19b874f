"""Processor time and memory of process trees, and bytes of a network interface, from the kernel's files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class ProcessUsage:
    """Use of one process, or of a tree of them."""

    cpu_seconds: float
    """Processor time of its threads, and of its children that have ended, since its start."""
    memory_bytes: int
    """Resident memory; pages that processes share count for each."""


@dataclass(frozen=True)
class ProcessEntry:
    """Process with its parent, as in one row of the process table."""

    parent: int
    usage: ProcessUsage


def read_process_table(
    folder: Path = Path("/proc"), numbers: Iterable[int] | None = None
) -> dict[int, ProcessEntry]:
    """Read the living processes of some process numbers, or all, by their number."""
    table = {}
    for number in process_numbers(folder) if numbers is None else numbers:
        try:
            text = _read(f"{folder}/{number}/stat")
        except OSError:
            continue  # it has ended
        table[number] = parse_stat(text)
    return table


def process_numbers(folder: Path = Path("/proc")) -> list[int]:
    """Return the numbers of all living processes."""
    return [int(entry.name) for entry in os.scandir(folder) if entry.name.isdecimal()]


def _read(path: str) -> str:
    """Read a small file in one piece: `open` of a text file takes as long as the kernel's work."""
    number = os.open(path, os.O_RDONLY)
    try:
        return os.read(number, 4096).decode(errors="replace")
    finally:
        os.close(number)


def parse_stat(text: str) -> ProcessEntry:
    """Parse /proc/PID/stat, see proc(5); the name, in parentheses, may contain anything."""
    fields = text.rpartition(")")[2].split()
    ticks = sum(int(field) for field in fields[11:15])
    return ProcessEntry(
        int(fields[1]), ProcessUsage(ticks / _TICKS_PER_SECOND, int(fields[21]) * _PAGE_BYTES)
    )


def sum_trees(table: Mapping[int, ProcessEntry], roots: Iterable[int]) -> dict[int, ProcessUsage]:
    """Return the use of each living root together with all its descendants."""
    children = children_of(table)
    return {
        root: sum_usages(table[number].usage for number in tree_of(children, root))
        for root in roots
        if root in table
    }


def sum_usages(usages: Iterable[ProcessUsage]) -> ProcessUsage:
    """Return the use of some processes together."""
    all_usages = list(usages)
    return ProcessUsage(
        sum(usage.cpu_seconds for usage in all_usages), sum(usage.memory_bytes for usage in all_usages)
    )


def children_of(table: Mapping[int, ProcessEntry]) -> dict[int, list[int]]:
    """Return the numbers of the children by that of their parent."""
    children: dict[int, list[int]] = {}
    for number, entry in table.items():
        children.setdefault(entry.parent, []).append(number)
    return children


def tree_of(children: Mapping[int, Sequence[int]], root: int) -> list[int]:
    """Return the numbers of a process and of all its descendants."""
    tree = [root]
    for number in tree:  # those that it adds, too
        tree += children.get(number, ())
    return tree


def read_anonymous_bytes(process: int, folder: Path = Path("/proc")) -> int | None:
    """Return the resident memory of a process that is of no file and not shared; None: it has ended."""
    try:
        fields = _read(f"{folder}/{process}/statm").split()
    except OSError:
        return None
    return (int(fields[1]) - int(fields[2])) * _PAGE_BYTES


def read_network_bytes(
    interface: str | None, folder: Path = Path("/sys/class/net")
) -> tuple[int, int] | None:
    """Return received and sent bytes of an interface since its start; None: it is unknown."""
    if interface is None:
        return None
    return read_counters(folder / interface / "statistics", "rx_bytes", "tx_bytes")


def read_counters(folder: Path, received: str, sent: str) -> tuple[int, int] | None:
    """Return counters of received and of sent data, from the kernel's files of these names; None: unknown."""
    try:
        return int((folder / received).read_text()), int((folder / sent).read_text())
    except (OSError, ValueError):
        return None
