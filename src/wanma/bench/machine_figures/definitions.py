"""Definitions of the figures of a machine benchmark, by the pattern of their names.

A pattern's groups fill the places of its title. Rates are those of one device, or one rank of a CPU, while
all ranks work at once, if nothing else is said.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Literal

from wanma.bench.machine_figures.case_names import SECONDS, is_case_figure
from wanma.collectives.measurement.bandwidth import BUS_FACTORS


@dataclass(frozen=True)
class MachineMetric:
    """Title, unit, better direction and definition of a figure."""

    title: str
    unit: str
    better: Literal["lower", "higher", ""]
    definition: str


_COLLECTIVES = "|".join(BUS_FACTORS)
_DEFINITIONS: Mapping[str, MachineMetric] = MappingProxyType(
    {
        r"products\.(\w+?)_flops_per_second": MachineMetric(
            "Matrix products, {0}",
            "FLOP/s",
            "higher",
            "2 m n k over the time of a product (m, k) × (k, n), the highest over the shapes.",
        ),
        r"attention\.(\w+?)_flops_per_second": MachineMetric(
            "Attention forward, {0}",
            "FLOP/s",
            "higher",
            "FLOPs of causal attention, half of all scores, over its time; the highest over the shapes.",
        ),
        r"attention_backward\.(\w+?)_flops_per_second": MachineMetric(
            "Attention backward, {0}",
            "FLOP/s",
            "higher",
            "2.5 times the FLOPs of forward over the time of backward; the highest over the shapes.",
        ),
        r"memory_copy_bytes_per_second": MachineMetric(
            "Memory copy",
            "B/s",
            "higher",
            "Bytes read and bytes written over the time of a copy that is larger than the caches.",
        ),
        r"memory_stream_bytes_per_second": MachineMetric(
            "Memory stream",
            "B/s",
            "higher",
            "Bytes read and written over the time of the longest elementwise product into new memory.",
        ),
        r"host_to_device_bytes_per_second": MachineMetric(
            "Host to device", "B/s", "higher", "Bytes over the time of a copy from page-locked host memory."
        ),
        r"device_to_host_bytes_per_second": MachineMetric(
            "Device to host", "B/s", "higher", "Bytes over the time of a copy to page-locked host memory."
        ),
        r"operator_seconds": MachineMetric(
            "Operator",
            "s",
            "lower",
            "Time of a small operator under autograd, forward and backward, from one to the next.",
        ),
        r"link_latency_seconds": MachineMetric(
            "Link latency",
            "s",
            "lower",
            "Half the round trip of 8 bytes between two ranks, one pair at a time; median over the pairs.",
        ),
        r"link_bytes_per_second": MachineMetric(
            "Link bandwidth",
            "B/s",
            "higher",
            "Bytes over the time of a message in a stream in one direction, one pair at a time; median over "
            "the directed pairs.",
        ),
        r"pair\.(\d+)-(\d+)\.latency_seconds": MachineMetric(
            "Latency of ranks {0} and {1}", "s", "lower", "Half the round trip of 8 bytes, nothing else sent."
        ),
        r"pair\.(\d+)-(\d+)_bytes_per_second": MachineMetric(
            "Rank {0} to rank {1}",
            "B/s",
            "higher",
            "Bytes over the time of a message in a stream in this direction, nothing else sent.",
        ),
        r"ring_bytes_per_second": MachineMetric(
            "Ring",
            "B/s",
            "higher",
            "Bytes that each rank sends to the next one over the time of the largest message, all at once.",
        ),
        r"bisection_bytes_per_second": MachineMetric(
            "Bisection",
            "B/s",
            "higher",
            "Bytes from the first half of the ranks to the second over the slowest rank's time, while as "
            "many come back; rank i of each half exchanges with rank i of the other, all at once.",
        ),
        rf"({_COLLECTIVES})_latency_seconds": MachineMetric(
            "{0} latency",
            "s",
            "lower",
            "Time of the smallest measured size by its fastest algorithm, on the slowest rank.",
        ),
        rf"({_COLLECTIVES})_bus_bytes_per_second": MachineMetric(
            "{0} bus bandwidth",
            "B/s",
            "higher",
            "Size over time, times the bus factor of nccl-tests; the highest over sizes and algorithms.",
        ),
        r"storage\.write_bytes_per_second": MachineMetric(
            "Storage write",
            "B/s",
            "higher",
            "Bytes of new files, one for each rank, over the time of writing and fsync; all ranks together.",
        ),
        r"storage\.read_cold_bytes_per_second": MachineMetric(
            "Storage read, cold",
            "B/s",
            "higher",
            "Bytes over the time of reading files that the kernel dropped from its page cache; all ranks "
            "together.",
        ),
        r"storage\.read_cached_bytes_per_second": MachineMetric(
            "Storage read, cached",
            "B/s",
            "higher",
            "The same from the page cache, which the kernel does not drop on this file system: no rate of a "
            "disk.",
        ),
        r"storage\.random_reads_per_second": MachineMetric(
            "Random reads",
            "1/s",
            "higher",
            "Reads of 4 KiB at random places of a dropped file, one after the other on each rank; all ranks "
            "together.",
        ),
        r"storage\.flush_seconds": MachineMetric(
            "Flush", "s", "lower", "Time of writing 4 KiB over a file, and fsync."
        ),
        r"storage\.small_files_written_per_second": MachineMetric(
            "Small files written",
            "1/s",
            "higher",
            "Files of 4 KiB created, written and closed, without fsync; all ranks together.",
        ),
        r"storage\.small_files_read_per_second": MachineMetric(
            "Small files read",
            "1/s",
            "higher",
            "Files of 4 KiB opened, read and closed, from the page cache; all ranks together.",
        ),
        r"disturbed_share": MachineMetric(
            "Disturbed cases",
            "share",
            "lower",
            "Cases with fewer than three undisturbed rounds, of all; they count with all their rounds.",
        ),
        r"multiprocessors": MachineMetric(
            "Multiprocessors", "", "", "Multiprocessors of one GPU; 0 on a CPU."
        ),
        r"backend\.(.+)": MachineMetric(
            "Backend {0}", "", "", "1: the messages between ranks go over this backend."
        ),
    }
)
_CASE = MachineMetric(
    "{0}", "s", "lower", "Time of one case, lower quartile of its undisturbed rounds, mean over its ranks."
)
RANK_FIGURE = re.compile(r"rank\.(\d+)\.(.+)")
"""Pattern of the name of one rank's figure: the rank, and the name of the figure of all."""


@cache
def find_machine_metric(name: str) -> MachineMetric | None:
    """Return the metric of a figure of a machine benchmark; None: it is of another program."""
    if match := RANK_FIGURE.fullmatch(name):
        of_all = find_machine_metric(match[2])
        if of_all is None:
            return None
        title = f"{of_all.title}, rank {match[1]}"
        return MachineMetric(title, of_all.unit, of_all.better, f"{of_all.definition} Of this rank alone.")
    for pattern, metric in _DEFINITIONS.items():
        if match := re.fullmatch(pattern, name):
            return _filled(metric, *match.groups())
    if is_case_figure(name):
        return _filled(_CASE, name.removesuffix(SECONDS).replace(".", " "))
    return None


def is_machine_detail(name: str) -> bool:
    """Return True if a figure is of one case, rank or pair, or describes the measurement: no limit."""
    prefixes = ("rank.", "pair.", "backend.", "multiprocessors", "disturbed_share")
    return find_machine_metric(name) is not None and (is_case_figure(name) or name.startswith(prefixes))


def _filled(metric: MachineMetric, *words: str) -> MachineMetric:
    title = metric.title.format(*(word.replace("_", "-") for word in words))
    return MachineMetric(title[:1].upper() + title[1:], metric.unit, metric.better, metric.definition)
