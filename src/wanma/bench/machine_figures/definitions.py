"""Definitions of the figures of a machine benchmark, by the pattern of their names.

A pattern's groups fill the places of its title. Rates are those of one device, or one rank of a CPU, while
all ranks work at once, if nothing else is said.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from wanma.bench.machine_figures.case_names import SECONDS, is_case_figure
from wanma.collectives.measurement.bandwidth import BUS_FACTORS

Definition = tuple[str, str]
"""Title and definition of a figure, whose unit and better direction follow from the end of its name."""

_COLLECTIVES = "|".join(BUS_FACTORS)
_DEFINITIONS: Mapping[str, Definition] = MappingProxyType(
    {
        r"products\.(\w+?)_flops_per_second": (
            "Matrix products, {0}",
            "2 m n k over the time of a product (m, k) × (k, n), the highest over the shapes.",
        ),
        r"attention\.(\w+?)_flops_per_second": (
            "Attention forward, {0}",
            "FLOPs of causal attention, half of all scores, over its time; the highest over the shapes.",
        ),
        r"attention_backward\.(\w+?)_flops_per_second": (
            "Attention backward, {0}",
            "2.5 times the FLOPs of forward over the time of backward; the highest over the shapes.",
        ),
        r"memory_copy_bytes_per_second": (
            "Memory copy",
            "Bytes read and bytes written over the time of a copy that is larger than the caches.",
        ),
        r"memory_stream_bytes_per_second": (
            "Memory stream",
            "Bytes read and written over the time of the longest elementwise product into new memory.",
        ),
        r"host_to_device_bytes_per_second": (
            "Host to device",
            "Bytes over the time of a copy from page-locked host memory.",
        ),
        r"device_to_host_bytes_per_second": (
            "Device to host",
            "Bytes over the time of a copy to page-locked host memory.",
        ),
        r"operator_seconds": (
            "Operator",
            "Time of a small operator under autograd, forward and backward, from one to the next.",
        ),
        r"link_latency_seconds": (
            "Link latency",
            "Half the round trip of 8 bytes between two ranks, one pair at a time; median over the pairs.",
        ),
        r"link_bytes_per_second": (
            "Link bandwidth",
            "Bytes over the time of a message in a stream in one direction, one pair at a time; median over "
            "the directed pairs.",
        ),
        r"pair\.(\d+)-(\d+)\.latency_seconds": (
            "Latency of ranks {0} and {1}",
            "Half the round trip of 8 bytes, nothing else sent.",
        ),
        r"pair\.(\d+)-(\d+)_bytes_per_second": (
            "Rank {0} to rank {1}",
            "Bytes over the time of a message in a stream in this direction, nothing else sent.",
        ),
        r"ring_bytes_per_second": (
            "Ring",
            "Bytes that each rank sends to the next one over the time of the largest message, all at once.",
        ),
        r"bisection_bytes_per_second": (
            "Bisection",
            "Bytes from the first half of the ranks to the second over the slowest rank's time, while as "
            "many come back; rank i of each half exchanges with rank i of the other, all at once.",
        ),
        rf"({_COLLECTIVES})_latency_seconds": (
            "{0} latency",
            "Time of the smallest measured size by its fastest algorithm, on the slowest rank.",
        ),
        rf"({_COLLECTIVES})_bus_bytes_per_second": (
            "{0} bus bandwidth",
            "Size over time, times the bus factor of nccl-tests; the highest over sizes and algorithms.",
        ),
        r"storage\.write_bytes_per_second": (
            "Storage write",
            "Bytes of new files, one for each rank, over the time of writing and fsync; all ranks together.",
        ),
        r"storage\.read_cold_bytes_per_second": (
            "Storage read, cold",
            "Bytes over the time of reading files that the kernel dropped from its page cache; all ranks "
            "together.",
        ),
        r"storage\.read_cached_bytes_per_second": (
            "Storage read, cached",
            "The same from the page cache, which the kernel does not drop on this file system: no rate of a "
            "disk.",
        ),
        r"storage\.random_reads_per_second": (
            "Random reads",
            "Reads of 4 KiB at random places of a dropped file, one after the other on each rank; all ranks "
            "together.",
        ),
        r"storage\.flush_seconds": ("Flush", "Time of writing 4 KiB over a file, and fsync."),
        r"storage\.small_files_written_per_second": (
            "Small files written",
            "Files of 4 KiB created, written and closed, without fsync; all ranks together.",
        ),
        r"storage\.small_files_read_per_second": (
            "Small files read",
            "Files of 4 KiB opened, read and closed, from the page cache; all ranks together.",
        ),
        r"disturbed_share": (
            "Disturbed cases",
            "Cases with fewer than three undisturbed rounds, of all; they count with all their rounds.",
        ),
        r"multiprocessors": ("Multiprocessors", "Multiprocessors of one GPU; 0 on a CPU."),
        r"backend\.(.+)": ("Backend {0}", "1: the messages between ranks go over this backend."),
    }
)
_CASE = ("{0}", "Time of one case, lower quartile of its undisturbed rounds, mean over its ranks.")
RANK_FIGURE = re.compile(r"rank\.(\d+)\.(.+)")
"""Pattern of the name of one rank's figure: the rank, and the name of the figure of all."""


@cache
def machine_definition(name: str) -> Definition | None:
    """Return title and definition of a figure of a machine benchmark; None: it is of another program."""
    if match := RANK_FIGURE.fullmatch(name):
        of_all = machine_definition(match[2])
        return of_all and (f"{of_all[0]}, rank {match[1]}", f"{of_all[1]} Of this rank alone.")
    for pattern, definition in _DEFINITIONS.items():
        if match := re.fullmatch(pattern, name):
            return _filled(definition, *match.groups())
    return _filled(_CASE, name.removesuffix(SECONDS).replace(".", " ")) if is_case_figure(name) else None


def is_machine_detail(name: str) -> bool:
    """Return True if a figure is of one case, rank or pair, or describes the measurement: no limit."""
    prefixes = ("rank.", "pair.", "backend.", "multiprocessors", "disturbed_share")
    return machine_definition(name) is not None and (is_case_figure(name) or name.startswith(prefixes))


def _filled(definition: Definition, *words: str) -> Definition:
    title = definition[0].format(*(word.replace("_", "-") for word in words))
    return title[:1].upper() + title[1:], definition[1]
