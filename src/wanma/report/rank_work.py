"""Work of each rank over time, from the records of usage of its node."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from wanma.job.run.run_directory import RunDirectory

WINDOWS = 60
"""Most windows of time of one rank."""
TAIL_BYTES = 1 << 20
"""Bytes at the end of a node's record that are read."""


@dataclass(frozen=True)
class RankWindows:
    """Work of one rank by window of time, oldest first."""

    rank: int
    node: int
    times: Sequence[float]
    """End of each window, in unix seconds."""
    compute_seconds: Sequence[float]
    """Computation of a step; NaN: no step ended in the window."""
    data_seconds: Sequence[float]
    """Wait for data of a step."""
    cores: float | None
    """Processors in use in the last window."""
    memory_bytes: float

    @property
    def work_seconds(self) -> list[float]:
        """Return the time of a step without waits for other ranks, by window."""
        return [compute + data for compute, data in zip(self.compute_seconds, self.data_seconds, strict=True)]

    @property
    def name(self) -> str:
        return f"rank {self.rank}"


def read_node_records(run: RunDirectory) -> dict[int, list[dict[str, Any]]]:
    """Return the newest records of usage by node, oldest first; torn lines are left out."""
    nodes = {}
    for path in run.node_usage(0).parent.glob("node-*.jsonl"):
        number = path.stem.removeprefix("node-")
        if not number.isdigit():
            continue
        try:
            with path.open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
                lines = file.read().splitlines()
        except OSError:
            continue
        nodes[int(number)] = [record for line in lines if (record := _parse(line)) is not None]
    return nodes


def read_rank_windows(run: RunDirectory) -> list[RankWindows]:
    """Return the work of all ranks that report it, in the order of ranks."""
    works = []
    for node, records in read_node_records(run).items():
        step = max(1, math.ceil(len(records) / WINDOWS))
        chosen = records[::-step][::-1]
        ranks = sorted({entry["rank"] for record in chosen[-1:] for entry in record.get("ranks", ())})
        works += [work for rank in ranks if (work := _windows(rank, node, chosen)) is not None]
    return sorted(works, key=lambda work: work.rank)


def _windows(rank: int, node: int, records: Sequence[Mapping[str, Any]]) -> RankWindows | None:
    entries = [
        (record["time"], entry)
        for record in records
        for entry in record.get("ranks", ())
        if entry["rank"] == rank and "compute_seconds" in entry
    ]
    if len(entries) < 2:
        return None
    times: list[float] = []
    compute: list[float] = []
    data: list[float] = []
    cores = None
    for (begin, before), (end, after) in pairwise(entries):
        steps = after["steps"] - before["steps"]
        if steps < 0:
            continue  # a restart
        times.append(end)
        for key, values in (("compute_seconds", compute), ("data_seconds", data)):
            values.append((after[key] - before[key]) / steps if steps else math.nan)
        if end > begin and after["cpu_seconds"] >= before["cpu_seconds"]:
            cores = (after["cpu_seconds"] - before["cpu_seconds"]) / (end - begin)
    if not times:
        return None
    return RankWindows(rank, node, times, compute, data, cores, float(entries[-1][1]["memory_bytes"]))


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "time" in record else None
