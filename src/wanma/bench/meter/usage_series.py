"""Series of readings of a measurement: means between two times, such as those of its steps."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wanma.bench.measurements.measurement import Utilization
from wanma.job.run.resource_limits import usable_cores


@dataclass(frozen=True)
class UsageReading:
    """State at one time. None: it cannot be read here."""

    time: float
    """Unix seconds."""
    cpu_seconds: float
    """CPU time of the measurement's processes so far."""
    network_bytes: float | None
    """Bytes on all interfaces but the loopback so far, as are those of disks."""
    disk_bytes: float | None
    gpu_utilizations: Sequence[float] = ()
    """Share of the driver's last sampling period in which a kernel ran, of each GPU."""
    gpu_memory_bytes: float | None = None
    """Memory in use on the fullest GPU."""
    foreign_seconds: float | None = None
    """CPU time since boot of programs outside the measurement."""


def foreign_cpu_between(readings: Sequence[UsageReading], start: float, end: float) -> float | None:
    """Return the mean CPUs that other programs used between two times; None: no readings cover them."""
    if end <= start or not readings or start < readings[0].time or end > readings[-1].time:
        return None
    used = [_interpolated(readings, lambda one: one.foreign_seconds, time) for time in (start, end)]
    return None if used[0] is None or used[1] is None else max(used[1] - used[0], 0.0) / (end - start)


def utilization_between(
    readings: Sequence[UsageReading], start: float, end: float, cores: int | None = None
) -> Utilization:
    """Return the utilization between two times; what lies between two readings is interpolated.

    Args:
        readings: readings in the order of time, the first before `start`.
        cores: CPUs that the measurement may use; None: those of this process.
    """
    if len(readings) < 2 or end <= start:
        return Utilization()
    seconds = end - start
    cores = usable_cores() if cores is None else cores

    def rate(value: Callable[[UsageReading], float | None]) -> float | None:
        ends = [_interpolated(readings, value, time) for time in (start, end)]
        return None if ends[0] is None or ends[1] is None else max(ends[1] - ends[0], 0.0) / seconds

    # A reading tells of the time before it: one right after the end still belongs to it.
    first, last = (bisect.bisect_left(readings, time, key=lambda one: one.time) for time in (start, end))
    inside = readings[first + 1 : last + 1] or readings[first : last + 1]
    busy = [share for one in inside for share in one.gpu_utilizations]
    cpus = rate(lambda one: one.cpu_seconds)
    return Utilization(
        cpu_utilization=None if cpus is None else cpus / cores,
        gpu_utilization=sum(busy) / len(busy) if busy else None,
        gpu_memory_bytes=max(
            (one.gpu_memory_bytes for one in readings if one.gpu_memory_bytes is not None), default=None
        ),
        network_bytes_per_second=rate(lambda one: one.network_bytes),
        disk_bytes_per_second=rate(lambda one: one.disk_bytes),
    )


def _interpolated(
    readings: Sequence[UsageReading], value: Callable[[UsageReading], float | None], time: float
) -> float | None:
    """Return a counter at a time; before the first and after the last reading it stays."""
    after = bisect.bisect_left(readings, time, key=lambda one: one.time)
    if after in (0, len(readings)):
        return value(readings[min(after, len(readings) - 1)])
    earlier, later = readings[after - 1], readings[after]
    before, behind = value(earlier), value(later)
    if before is None or behind is None:
        return None
    return before + (behind - before) * (time - earlier.time) / (later.time - earlier.time)
