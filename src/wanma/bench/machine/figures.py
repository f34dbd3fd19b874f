"""Figures of one execution of a machine benchmark: the times of its cases, and the rates that follow.

Rates are those of one device, or rank of a CPU, while all of them work at once; `storage.*` are of all
together. `machine_figures.definitions` defines each. Pure functions, without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from statistics import median
from typing import Any

from wanma.bench.machine_figures.case_names import SECONDS, CaseParts, parse_case
from wanma.collectives.measurement.bandwidth import BUS_FACTORS

COPIES = {"copy": "memory_copy", "to_host": "device_to_host", "from_host": "host_to_device"}
"""Cases of one size in bytes, and the name of the rate."""
STORAGE_RATES = {
    "disk": "write",
    "storage_read_cold": "read_cold",
    "storage_read_cached": "read_cached",
}
STORAGE_COUNTS = {
    "storage_random_read": "random_reads",
    "storage_small_files_write": "small_files_written",
    "storage_small_files_read": "small_files_read",
}


@dataclass(frozen=True)
class CaseTime:
    """Measured time of one case."""

    name: str
    seconds: float
    """Mean of all ranks, or of those that the case is about."""
    seconds_by_rank: tuple[float, ...]
    is_disturbed: bool

    @property
    def parts(self) -> CaseParts:
        parts = parse_case(self.name)
        assert parts is not None  # the worker named it
        return parts


def read_times(content: Mapping[str, Any]) -> list[CaseTime]:
    """Return the times in what rank 0 wrote."""
    times = []
    for case in content["cases"]:
        by_rank, seconds = tuple(case["seconds_by_rank"]), case["seconds"]
        if case["ranks"]:
            seconds = sum(by_rank[rank] for rank in case["ranks"]) / len(case["ranks"])
        times.append(CaseTime(case["name"], seconds, by_rank, case["is_disturbed"]))
    return times


def execution_figures(content: Mapping[str, Any], ranks: int) -> dict[str, float]:
    """Return all figures of an execution by name."""
    times = read_times(content)
    figures = dict(_device_figures(times, ranks))
    figures |= dict(_link_figures(times, ranks))
    figures |= dict(_collective_figures(times, ranks))
    figures |= dict(_storage_figures(times, ranks))
    figures |= {time.name + SECONDS: time.seconds for time in times}
    figures["disturbed_share"] = sum(time.is_disturbed for time in times) / max(len(times), 1)
    figures["multiprocessors"] = float(content["processors"])
    figures[f"backend.{content['backend']}"] = 1.0
    return figures


def attention_flops(kind: str, shape: Sequence[int]) -> float:
    """Return the FLOPs of causal attention; backward computes five products where forward has two.

    Args:
        kind: 'attention' or 'attention_backward'.
        shape: (sequences, queries, heads, head width).
    """
    sequences, length, heads, width = shape
    forward = 2.0 * sequences * length * length * heads * width
    return forward * (1.0 if kind == "attention" else 2.5)


def _device_figures(times: Sequence[CaseTime], ranks: int) -> Iterator[tuple[str, float]]:
    for kind, name in (
        ("product", "products"),
        ("attention", "attention"),
        ("attention_backward", "attention_backward"),
    ):
        own = [time for time in times if time.parts.kind == kind]
        for precision in dict.fromkeys(time.parts.precision for time in own):

            def work(time: CaseTime, kind: str = kind) -> float:
                shape = time.parts.sizes
                return 2.0 * prod(shape) if kind == "product" else attention_flops(kind, shape)

            same = [time for time in own if time.parts.precision == precision]
            yield from _best_rate(
                same, work, f"{name}.{precision}_flops_per_second", ranks, kind == "product"
            )
    for kind, name in COPIES.items():
        copies = [time for time in times if time.parts.kind == kind]
        yield from _best_rate(copies, _first_size, f"{name}_bytes_per_second", ranks, True)
    streams = [time for time in times if time.parts.kind == "stream"]
    if streams:
        longest = max(streams, key=_first_size)
        yield "memory_stream_bytes_per_second", _first_size(longest) / longest.seconds
    for time in times:
        if time.parts.kind == "dispatch":
            yield "operator_seconds", time.seconds / time.parts.sizes[0]


def _best_rate(
    times: Sequence[CaseTime], work: Callable[[CaseTime], float], name: str, ranks: int, is_by_rank: bool
) -> Iterator[tuple[str, float]]:
    """Yield the highest rate of several cases, and that of each rank in the same case."""
    if not times:
        return
    best = max(times, key=lambda time: work(time) / time.seconds)
    yield name, work(best) / best.seconds
    if is_by_rank and ranks > 1:
        for rank, seconds in enumerate(best.seconds_by_rank):
            yield f"rank.{rank}.{name}", work(best) / seconds


def _link_figures(times: Sequence[CaseTime], ranks: int) -> Iterator[tuple[str, float]]:
    latencies = {time.parts.ranks: time.seconds for time in times if time.parts.kind == "pair_latency"}
    rates = {
        time.parts.ranks: time.parts.sizes[0] / time.seconds
        for time in times
        if time.parts.kind == "pair_stream"
    }
    if latencies:
        yield "link_latency_seconds", median(latencies.values())
    if rates:
        yield "link_bytes_per_second", median(rates.values())
    for (first, second), seconds in latencies.items():
        yield f"pair.{first}-{second}.latency_seconds", seconds
    for (source, target), rate in rates.items():
        yield f"pair.{source}-{target}_bytes_per_second", rate
    messages = [time for time in times if time.parts.kind == "send"]
    if messages:
        largest = max(messages, key=_first_size)
        yield "ring_bytes_per_second", _first_size(largest) / largest.seconds
    for time in times:
        if time.parts.kind == "bisection":
            yield "bisection_bytes_per_second", ranks // 2 * time.parts.sizes[0] / time.seconds


def _collective_figures(times: Sequence[CaseTime], ranks: int) -> Iterator[tuple[str, float]]:
    for collective, factor in BUS_FACTORS.items():
        own = [time for time in times if time.parts.kind == collective]
        if own:
            smallest = min(time.parts.sizes[0] for time in own)
            yield (
                f"{collective}_latency_seconds",
                min(time.seconds for time in own if time.parts.sizes[0] == smallest),
            )
            rate = max(time.parts.sizes[0] / time.seconds for time in own)
            yield f"{collective}_bus_bytes_per_second", rate * factor(ranks)


def _storage_figures(times: Sequence[CaseTime], ranks: int) -> Iterator[tuple[str, float]]:
    for time in times:
        kind, sizes = time.parts.kind, time.parts.sizes
        if kind in STORAGE_RATES:
            yield f"storage.{STORAGE_RATES[kind]}_bytes_per_second", ranks * sizes[0] / time.seconds
        elif kind in STORAGE_COUNTS:
            yield f"storage.{STORAGE_COUNTS[kind]}_per_second", ranks * sizes[0] / time.seconds
        elif kind == "storage_flush":
            yield "storage.flush_seconds", time.seconds


def _first_size(time: CaseTime) -> float:
    return float(time.parts.sizes[0])
