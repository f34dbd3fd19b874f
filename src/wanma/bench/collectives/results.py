"""What `wanma bench collectives` found, as data: JSON and CSV of it."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from wanma.collectives.measurement.bandwidth import Timing

COLUMNS = (
    "collective",
    "algorithm",
    "dtype",
    "ranks",
    "nodes",
    "size_bytes",
    "seconds",
    "algorithm_bytes_per_second",
    "bus_bytes_per_second",
    "limit_bytes_per_second",
    "share_of_limit",
    "forecast_seconds",
)


@dataclass(frozen=True)
class Sweep:
    """All that one number of ranks measured."""

    ranks: int
    nodes: int
    device: str
    """Its name, as a calibration has it."""
    threads: int
    """Of one rank that computes on the CPU; 0 for an accelerator."""
    backend: str
    """What carried the messages: 'gloo', 'nccl'."""
    limit: str
    """What the bandwidths are held against, in words."""
    machine: str
    """In words, with the versions."""
    date: str
    """ISO 8601, UTC."""
    timings: tuple[Timing, ...]
    disturbed: int
    """Of them and their limits, those during all of which other programs were busy."""

    @property
    def title(self) -> str:
        """'4 ranks on 2 nodes, gloo'."""
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.ranks} ranks{nodes}, {self.backend}"

    def to_json(self) -> dict[str, Any]:
        rows = [dict(zip(COLUMNS, _row(one), strict=True)) for one in self.timings]
        return {**asdict(self), "timings": rows}


def to_csv(sweeps: Iterable[Sweep]) -> str:
    """A line for every timing, under `COLUMNS`."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for sweep in sweeps:
        writer.writerows(_row(one) for one in sweep.timings)
    return text.getvalue()


def _row(one: Timing) -> Sequence[Any]:
    return (
        one.collective,
        one.algorithm,
        one.dtype,
        one.ranks,
        one.nodes,
        one.size_bytes,
        one.seconds,
        one.algorithm_bandwidth,
        one.bus_bandwidth,
        one.limit_bytes_per_second,
        one.share_of_limit,
        one.forecast_seconds,
    )
