"""Evidence of a diagnosis: what the records of a run say about its newest steps, its ranks and its end."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from wanma.job.run.run_directory import RunDirectory
from wanma.report.forecast_comparison import first_measured_row
from wanma.report.rank_work import read_node_records
from wanma.report.run_report import Report, read_report
from wanma.report.step_parts import EXPOSED, step_parts

WINDOW_STEPS = 200
"""Number of newest steps that are judged."""


@dataclass(frozen=True)
class RankWork:
    """Work of one rank in the window, from its node's record."""

    rank: int
    node: int
    compute_seconds: float | None
    """Computation of a step; None: it is unknown."""
    data_seconds: float | None
    """Loading of a step's data, as far as the rank waited for it; None: it is unknown."""
    cores: float | None
    """Processors in use, on average."""
    grown_bytes: float | None
    """Growth of its memory from the first third of the records to the last; None: too few records."""
    memory_bytes_per_hour: float | None
    """Its rate; None: too few records."""
    memory_bytes: float


@dataclass(frozen=True)
class Evidence:
    """Evidence of one run."""

    run: RunDirectory
    report: Report
    steps: int
    """Number of steps in the window."""
    step_seconds: float | None
    """Mean time of a step in the window; None: there are too few steps."""
    parts: Mapping[str, float]
    """Parts of that time, as `report.step_parts` has them, in seconds."""
    load_seconds: Mapping[str, float]
    """Time of the loader threads for a step by kind of work."""
    ranks: Sequence[RankWork]
    nodes: Mapping[int, Sequence[Mapping[str, Any]]]
    """Newest records of usage of each node, oldest first."""
    mfu: float | None
    """Mean MFU in the window; None: it is unknown."""
    non_finite: Mapping[str, Any]
    """Record of the first step with a number that is not finite; empty: there is none."""
    hang_report: str
    """Text of the hang report; empty: there is none."""

    def share(self, part: str) -> float:
        """Return the share of a step that a part takes, 0 to 1."""
        return self.parts.get(part, 0.0) / self.step_seconds if self.step_seconds else 0.0

    @property
    def exposed_seconds(self) -> float:
        """Return the exposed communication of a step, and waits of stages, in seconds."""
        return sum(self.parts.get(kind, 0.0) for kind in ("data", "tensor", "context", "expert", "pipeline"))

    @property
    def free_memory_share(self) -> float | None:
        """Return the least share of memory that is free, of the GPUs or else of the nodes; None: unknown."""
        newest = [records[-1] for records in self.nodes.values() if records]
        gpus = [gpu for record in newest for gpu in record.get("gpus") or ()]
        pairs = [(gpu.get("memory_bytes"), gpu.get("total_memory_bytes")) for gpu in gpus]
        free = [1 - used / total for used, total in pairs if used is not None and total]
        if not gpus:
            free = [
                record["memory_available_bytes"] / record["memory_bytes"]
                for record in newest
                if record.get("memory_bytes") and "memory_available_bytes" in record
            ]
        return min(free, default=None)


def read_evidence(run: RunDirectory) -> Evidence:
    """Read the evidence of a run directory."""
    report = read_report(run)
    nodes = read_node_records(run)
    start = max(first_measured_row(report), len(report.steps["step"]) - WINDOW_STEPS)
    window = {key: column[start:] for key, column in report.steps.items()}
    seconds = _mean(window.get("step_seconds", ()))
    times = {}
    for key, column in window.items():
        for prefix, name in (("phases.", ""), ("exposed_communication_seconds.", EXPOSED)):
            if key.startswith(prefix):
                times[name + key.removeprefix(prefix)] = _mean(column) or 0.0
    for key, name in (("compute_seconds", "compute"), ("bubble_seconds", "bubble")):
        if (value := _mean(window.get(key, ()))) is not None:
            times[name] = value
    hang_report = run.rank_log(0).with_name("hang-report.txt")
    return Evidence(
        run=run,
        report=report,
        steps=len(window["step"]),
        step_seconds=seconds,
        parts=step_parts(seconds, times) if seconds else {},
        load_seconds={
            key.removeprefix("load_seconds."): _mean(column) or 0.0
            for key, column in window.items()
            if key.startswith("load_seconds.")
        },
        ranks=[work for node, records in sorted(nodes.items()) for work in _rank_works(node, records)],
        nodes=nodes,
        mfu=_mean(window.get("mfu", ())),
        non_finite=_record_of_step(run.metrics, report.non_finite[0]) if report.non_finite else {},
        hang_report=hang_report.read_text(encoding="utf-8", errors="replace")
        if hang_report.is_file()
        else "",
    )


def _rank_works(node: int, records: Sequence[Mapping[str, Any]]) -> list[RankWork]:
    """Return the work of a node's ranks between the first and last record of its newest processes."""
    works = []
    for rank in sorted({entry["rank"] for record in records[-1:] for entry in record.get("ranks", ())}):
        points = [
            (record["time"], entry)
            for record in records
            for entry in record.get("ranks", ())
            if entry["rank"] == rank and entry.get("is_alive", True)
        ]
        # A restart begins to count again.
        falls = [
            number
            for number, (_, entry) in enumerate(points)
            if number and _fell(points[number - 1][1], entry)
        ]
        points = points[falls[-1] if falls else 0 :]
        if not points:
            continue
        (begin, first), (end, last) = points[0], points[-1]
        steps = (last.get("steps") or 0) - (first.get("steps") or 0)
        compute, data = (
            ((last[key] - first.get(key, 0.0)) / steps if steps > 0 and key in last else None)
            for key in ("compute_seconds", "data_seconds")
        )
        cores = (last["cpu_seconds"] - first["cpu_seconds"]) / (end - begin) if end > begin else None
        works.append(
            RankWork(rank, node, compute, data, cores, *_growth(points), float(last["memory_bytes"]))
        )
    return works


def _fell(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    return any((after.get(key) or 0) < (before.get(key) or 0) for key in ("steps", "cpu_seconds"))


def _growth(points: Sequence[tuple[float, Mapping[str, Any]]]) -> tuple[float | None, float | None]:
    """Return the growth of the memory by medians of the first and last third, and that an hour.

    None: there are too few points.
    """
    third = len(points) // 3
    if third < 3:
        return None, None
    early, late = points[:third], points[-third:]
    seconds = median(time for time, _ in late) - median(time for time, _ in early)
    growth = median(entry["memory_bytes"] for _, entry in late) - median(
        entry["memory_bytes"] for _, entry in early
    )
    return growth, 3600.0 * growth / seconds if seconds > 0 else None


def _record_of_step(path: Path, step: int) -> dict[str, Any]:
    """Return the record of a step; empty: it cannot be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict) and record.get("step") == step:
                    return record
    return {}


def _mean(values: Iterable[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else None
