"""Evidence of a diagnosis: what the records of a run say about its newest steps, its ranks and its end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from wanma.job.run.worker import Event
from wanma.report.forecast_comparison import first_measured_row
from wanma.report.rank_work import read_node_records
from wanma.report.run_report import Report
from wanma.report.step_parts import GPU_IDLE, HOST, step_parts, time_name

DISPATCH = "dispatch of kernels"
"""Part of a step in which the GPU waits for kernels of forward and backward; in reports it is the host's."""
WINDOW_STEPS = 200
"""Number of newest steps that are judged."""
MIN_RECORDS = 3
"""Fewest records of usage by which a rank is judged, where a window is shorter."""
BUSY_SHARE = 0.9
"""Share of a node's processors that are in use from which its programs wait for each other."""
MAX_GPU_READINGS = 60
"""Number of the newest readings of a GPU that are judged, of some minutes."""
MIN_LEAK_SECONDS = 60.0
"""Least time for which the memory of a rank is watched before its growth is judged."""
MIN_HALF_GROWTH = 0.25
"""Share of its growth that a leak has in each half of the time."""
DEAD_NODE_SECONDS = 60.0
"""Seconds before the newest start; a node whose newest record is older took part in an earlier one only."""


@dataclass(frozen=True)
class RankWork:
    """Work of one rank in the window, from its node's record."""

    rank: int
    node: int
    peer_group: int
    """Ranks with the same number have equal work."""
    compute_seconds: float | None
    """Computation of a step; None: it is unknown."""
    data_seconds: float | None
    """Loading of a step's data, as far as the rank waited for it; None: it is unknown."""
    cores: float | None
    """Processors in use, on average."""
    grown_bytes: float | None
    """Steady growth of its memory from the first third of the records to the last; None: too few records."""
    memory_bytes_per_hour: float | None
    """Its rate; None: too few records."""
    memory_bytes: float

    @property
    def work_seconds(self) -> float:
        """Time of a step without waits for other ranks; 0: it is unknown."""
        return 0.0 if self.compute_seconds is None else self.compute_seconds + (self.data_seconds or 0.0)

    def is_peer(self, other: RankWork) -> bool:
        """Return True for another rank with equal work, if the times of both are known."""
        times = self.compute_seconds, other.compute_seconds
        return other.rank != self.rank and other.peer_group == self.peer_group and None not in times


@dataclass(frozen=True)
class DiskUse:
    """Use of a node's disks in the window."""

    waiting_share: float
    """Share of the time in which some program waited for a disk, 0 to 1."""
    read_bytes_per_second: float
    """Bytes read from all disks; NaN: it is unknown."""


@dataclass(frozen=True)
class Evidence:
    """Evidence of one run."""

    report: Report
    steps: int
    """Number of steps in the window."""
    step_seconds: float | None
    """Mean time of a step in the window; None: there are too few steps."""
    parts: Mapping[str, float]
    """Parts of that time, as `report.step_parts` has them, and `DISPATCH`, in seconds."""
    load_seconds: Mapping[str, float]
    """Time of the loader threads for a step by kind of work."""
    ranks: Sequence[RankWork]
    nodes: Mapping[int, Sequence[Mapping[str, Any]]]
    """Newest records of usage of each node, oldest first."""
    foreign_processors: Mapping[int, float]
    """Share of its processors that other programs use, by node whose processors are all in use."""
    disks: Mapping[int, DiskUse]
    """Use of the disks by node; nodes that do not report it are absent."""
    stragglers: Sequence[Event]
    """Event of each rank that is a straggler, the one that loses most first."""
    mfu: float | None
    """Mean MFU in the window; None: it is unknown."""
    non_finite: Sequence[Event]
    """Event of each step whose loss or gradient is NaN or infinite, by step."""
    has_non_finite_end: bool
    """True if the newest of these steps has ended the run."""
    hang: str
    """Text of the hang that ended the run; empty: no hang did."""

    def share(self, part: str) -> float:
        """Return the share of a step that a part takes, 0 to 1."""
        return self.parts.get(part, 0.0) / self.step_seconds if self.step_seconds else 0.0

    def gpu_readings(self, rank: int) -> list[Mapping[str, Any]]:
        """Return the newest readings of a rank's GPU, oldest first."""
        newest = [record for records in self.nodes.values() for record in records[-MAX_GPU_READINGS:]]
        return [gpu for record in newest for gpu in record.get("gpus") or () if gpu.get("rank") == rank]

    @property
    def free_memory_share(self) -> float | None:
        """Return the least share of memory that is free, of the GPUs or else of the nodes; None: unknown."""
        newest = [records[-1] for records in self.nodes.values() if records]
        gpus = [gpu for record in newest for gpu in record.get("gpus") or () if gpu.get("is_used", True)]
        pairs = [
            (gpu.get("needed_memory_bytes") or gpu.get("memory_bytes"), gpu.get("total_memory_bytes"))
            for gpu in gpus  # what PyTorch's allocator only caches is free
        ]
        free = [1 - used / total for used, total in pairs if used is not None and total]
        if not gpus:
            free = [
                record["memory_available_bytes"] / record["memory_bytes"]
                for record in newest
                if record.get("memory_bytes") and "memory_available_bytes" in record
            ]
        return min(free, default=None)


def read_evidence(report: Report) -> Evidence:
    """Read the evidence of a run beside its report."""
    alive_since = report.starts[-1]["time"] - DEAD_NODE_SECONDS if report.starts else 0.0
    nodes = {
        node: records
        for node, records in sorted(read_node_records(report.run).items())
        if records and records[-1]["time"] >= alive_since
    }
    start = max(first_measured_row(report), len(report.steps["step"]) - WINDOW_STEPS)
    window = {key: column[start:] for key, column in report.steps.items()}
    seconds, times = _step_times(window)
    if seconds is not None:
        share = _checkpoint_share(report)
        seconds /= 1 - share
        times["checkpoint"] = share * seconds
    parts = step_parts(seconds, times) if seconds else {}
    if parts.get(HOST, 0.0) > times.get(HOST, 0.0):
        parts |= {HOST: times.get(HOST, 0.0), DISPATCH: parts[HOST] - times.get(HOST, 0.0)}
    by_step = {event["step"]: event for event in report.events if event["kind"] == "non_finite"}
    non_finite = [by_step[step] for step in sorted(by_step)]
    begin = next(iter(window.get("time", ())), math.inf)
    return Evidence(
        report=report,
        steps=len(window["step"]),
        step_seconds=seconds,
        parts=parts,
        load_seconds={
            key.removeprefix("load_seconds."): _mean(column) or 0.0
            for key, column in window.items()
            if key.startswith("load_seconds.")
        },
        ranks=[work for node, records in nodes.items() for work in _rank_works(node, records, begin)],
        nodes=nodes,
        foreign_processors={
            node: share
            for node, records in nodes.items()
            if (share := _foreign_share(_recent(records, begin))) > 0
        },
        disks={
            node: use
            for node, records in nodes.items()
            if (use := _disk_use(_recent(records, begin))) is not None
        },
        stragglers=_stragglers(report),
        mfu=_mean(window.get("mfu", ())),
        non_finite=non_finite,
        # A step that stops the run is not recorded, one that is skipped is.
        has_non_finite_end=report.state == "failed"
        and any(event["step"] > report.last_step for event in non_finite),
        hang=_hang(report),
    )


def _stragglers(report: Report) -> list[Event]:
    newest = {
        event["rank"]: event for event in _events_of_newest_start(report) if event["kind"] == "straggler"
    }
    slow = [event for event in newest.values() if event["is_slow"]]
    return sorted(slow, key=lambda event: event["peers_seconds"] - event["seconds"])


def _events_of_newest_start(report: Report) -> Sequence[Event]:
    starts = [number for number, event in enumerate(report.events) if event["kind"] == "start"]
    return report.events[starts[-1] if starts else 0 :]


def _step_times(window: Mapping[str, Sequence[float]]) -> tuple[float | None, dict[str, float]]:
    """Return the mean time of a step without saves, in seconds, and its times as `step_parts` takes them.

    The slowest twentieth of the steps is left out: one pause of the machine says nothing about the others.
    Medians would hide what only some steps wait for, such as data that several loaders deliver at once.
    """
    seconds = window.get("step_seconds", ())
    saves = window.get("phases.checkpoint") or [0.0] * len(seconds)
    unsaved = [
        value - (save if math.isfinite(save) else 0.0) for value, save in zip(seconds, saves, strict=False)
    ]
    known = sorted(
        (row for row, value in enumerate(unsaved) if math.isfinite(value)), key=unsaved.__getitem__
    )
    rows = known[: len(known) - len(known) // 20]
    times = {}
    for key, column in window.items():
        name = time_name(key)
        if name not in ("", "checkpoint") and (value := _mean(column[row] for row in rows)) is not None:
            times[name] = value
    busy = window.get("gpu_utilization")
    if busy and (idle := _mean((1.0 - busy[row]) * unsaved[row] for row in rows)) is not None:
        times[GPU_IDLE] = idle
    return _mean(unsaved[row] for row in rows), times


def _checkpoint_share(report: Report) -> float:
    """Return the share of the time of all measured steps that saves take: they may be far apart."""
    start = first_measured_row(report)
    saves, seconds = (
        sum(value for value in report.steps.get(key, ())[start:] if math.isfinite(value))
        for key in ("phases.checkpoint", "step_seconds")
    )
    return min(saves / seconds, 0.99) if seconds > 0 else 0.0


def _hang(report: Report) -> str:
    """Return the text of the hang that ended the run; empty: no hang did."""
    hangs = [event for event in _events_of_newest_start(report) if event["kind"] == "hang"]
    return str(hangs[-1]["text"]) if hangs and report.state == "failed" else ""


def _rank_works(node: int, records: Sequence[Mapping[str, Any]], begin: float) -> list[RankWork]:
    """Return the work of a node's ranks since a time, within the life of their newest processes."""
    works = []
    for rank in sorted({entry["rank"] for record in records[-1:] for entry in record.get("ranks", ())}):
        points = [
            {"time": record["time"], **entry}
            for record in records
            for entry in record.get("ranks", ())
            if entry["rank"] == rank and entry.get("is_alive", True)
        ]
        # A restart begins to count again.
        falls = [number for number, (before, after) in enumerate(pairwise(points), 1) if _fell(before, after)]
        points = points[falls[-1] if falls else 0 :]
        if not points:
            continue
        recent = _recent(points, begin)
        first, last = recent[0], recent[-1]
        seconds = last["time"] - first["time"]
        steps = (last.get("steps") or 0) - (first.get("steps") or 0)
        compute, data = (
            ((last[key] - first.get(key, 0.0)) / steps if steps > 0 and key in last else None)
            for key in ("compute_seconds", "data_seconds")
        )
        cores = (last["cpu_seconds"] - first["cpu_seconds"]) / seconds if seconds > 0 else None
        group, memory = last.get("peer_group") or 0, float(last["memory_bytes"])
        works.append(RankWork(rank, node, group, compute, data, cores, *_growth(points), memory))
    return works


def _recent(records: Sequence[Mapping[str, Any]], begin: float) -> Sequence[Mapping[str, Any]]:
    """Return the records since a time, or the newest where these are too few."""
    newest = [record for record in records if record["time"] >= begin]
    return newest if len(newest) >= MIN_RECORDS else records[-MIN_RECORDS:]


def _foreign_share(records: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of a node's processors that other programs use; 0: some are free, or it is unknown."""
    busy = used = available = 0.0
    for before, after in pairwise(records):
        ranks = {entry["rank"]: entry["cpu_seconds"] for entry in before["ranks"]}
        spent = [entry["cpu_seconds"] - ranks.get(entry["rank"], math.inf) for entry in after["ranks"]]
        if min(spent, default=-1.0) >= 0 and "cpu_seconds" in before and "cpu_seconds" in after:
            busy += after["cpu_seconds"] - before["cpu_seconds"]
            used += sum(spent)
            available += after["cpus"] * (after["time"] - before["time"])
    return (busy - used) / available if available and busy > BUSY_SHARE * available else 0.0


def _disk_use(records: Sequence[Mapping[str, Any]]) -> DiskUse | None:
    """Return the use of a node's disks; None: its system does not report it."""
    first, last = records[0], records[-1]
    seconds = last["time"] - first["time"]
    waited, read = (
        last.get(key, math.nan) - first.get(key, math.nan) for key in ("disk_wait_seconds", "disk_read_bytes")
    )
    return None if seconds <= 0 or math.isnan(waited) else DiskUse(waited / seconds, read / seconds)


def _fell(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    return any((after.get(key) or 0) < (before.get(key) or 0) for key in ("steps", "cpu_seconds"))


def _growth(points: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """Return the steady growth of the memory by medians of the thirds of its records, and that an hour.

    Only points after the first that has steps count, since a start allocates. None: there are too few.
    """
    started = points[0].get("steps") or 0
    sizes = [
        (
            entry["time"],
            entry["memory_bytes"] if entry.get("anonymous_bytes") is None else entry["anonymous_bytes"],
        )
        for entry in points
        if (entry.get("steps") or 0) > started
    ]
    third = len(sizes) // 3
    if third < 3 or sizes[-1][0] - sizes[0][0] < MIN_LEAK_SECONDS:
        return None, None
    parts = sizes[:third], sizes[third:-third], sizes[-third:]
    early, middle, late = (median(size for _, size in part) for part in parts)
    seconds = median(time for time, _ in parts[2]) - median(time for time, _ in parts[0])
    growth = late - early
    if min(middle - early, late - middle) < MIN_HALF_GROWTH * growth:
        growth = 0.0  # a single allocation, such as that of the first checkpoint
    return growth, 3600.0 * growth / seconds if seconds > 0 else None


def _mean(values: Iterable[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else None
