"""Work of each rank over time, from the records of usage of its node."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from wanma.job.run.run_directory import RunDirectory, read_tail
from wanma.observe.sinks.jsonl import parse_record

WINDOWS = 60
"""Most windows of time of one rank."""
TAIL_BYTES, SHORT_TAIL_BYTES = 1 << 20, 1 << 16
"""Bytes at the end of a node's record that are read, with up to `FEW_NODES` nodes, and with more."""
FEW_NODES = 16


@dataclass(frozen=True)
class RankWindows:
    """Work of one rank by window of time, oldest first."""

    rank: int
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


def read_node_records(
    run: RunDirectory, max_bytes: int | None = None
) -> dict[int, Sequence[Mapping[str, Any]]]:
    """Return the newest records of usage by node, oldest first; torn lines are left out.

    Args:
        run: run directory.
        max_bytes: most bytes of each node's file that are read; None: fewer with many nodes.
    """
    paths = [
        path
        for path in run.node_usage(0).parent.glob("node-*.jsonl")
        if path.stem.removeprefix("node-").isdigit()
    ]
    tail = max_bytes or (TAIL_BYTES if len(paths) <= FEW_NODES else SHORT_TAIL_BYTES)
    nodes = {}
    for path in paths:
        try:
            records = _read_tail(path, tail)
        except OSError:
            continue
        nodes[int(path.stem.removeprefix("node-"))] = records
    return nodes


_Version = tuple[int, int]
"""Size of a file in bytes, and the time of its change."""
_tails: OrderedDict[tuple[Path, int], tuple[_Version, Sequence[Mapping[str, Any]]]] = OrderedDict()
"""Records at the ends of files, as last read: one refresh of a page reads them several times."""


def _read_tail(path: Path, tail: int) -> Sequence[Mapping[str, Any]]:
    """Return the records in the last `tail` bytes of a file."""
    state = path.stat()
    version, known = (state.st_size, state.st_mtime_ns), _tails.pop((path, tail), None)
    if known is None or known[0] != version:
        records = map(parse_record, read_tail(path, tail).splitlines())
        known = version, tuple(record for record in records if record is not None and "time" in record)
    if len(_tails) >= 2 * FEW_NODES:
        _tails.popitem(last=False)
    _tails[path, tail] = known
    return known[1]


def read_rank_windows(run: RunDirectory) -> list[RankWindows]:
    """Return the work of all ranks that report it, in the order of ranks."""
    works = []
    for records in read_node_records(run).values():
        step = max(1, math.ceil(len(records) / WINDOWS))
        chosen = records[::-step][::-1]
        ranks = sorted({entry["rank"] for record in chosen[-1:] for entry in record.get("ranks", ())})
        works += [work for rank in ranks if (work := _windows(rank, chosen)) is not None]
    return sorted(works, key=lambda work: work.rank)


def _windows(rank: int, records: Sequence[Mapping[str, Any]]) -> RankWindows | None:
    entries = [
        (record["time"], entry)
        for record in records
        for entry in record.get("ranks", ())
        if entry["rank"] == rank and "compute_seconds" in entry
    ]
    compute: list[float] = []
    data: list[float] = []
    cores = None
    for (begin, before), (end, after) in pairwise(entries):
        steps = after["steps"] - before["steps"]
        if steps < 0:
            continue  # a restart
        for key, values in (("compute_seconds", compute), ("data_seconds", data)):
            values.append((after[key] - before[key]) / steps if steps else math.nan)
        if end > begin and after["cpu_seconds"] >= before["cpu_seconds"]:
            cores = (after["cpu_seconds"] - before["cpu_seconds"]) / (end - begin)
    return RankWindows(rank, compute, data, cores, float(entries[-1][1]["memory_bytes"])) if compute else None
