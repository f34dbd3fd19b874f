"""Meter of this machine while a measurement runs: a thread that takes a sample each second."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from wanma.bench.measurements.measurement import MachineUsage, Utilization
from wanma.bench.meter.machine_files import MachineFiles
from wanma.bench.meter.tree_reader import TreeReader
from wanma.bench.meter.usage_series import UsageReading, foreign_cpu_between, utilization_between
from wanma.hardware.measurement.cpu_load import busy_cpu_seconds
from wanma.observe.metrics.gpu import GpuReader, GpuReading, open_gpu_reader

INTERVAL_SECONDS = 1.0
MAX_COST = 0.002
"""Largest share of a CPU that the meter uses: after an expensive sample, it waits longer for the next."""
BUSY_SHARE = 0.5
"""Share of an interval from which a CPU counts as busy: the clock of an idle one is low by design."""


class MachineMeter:
    """Context manager that samples this machine until it is left.

        adopt_orphans()
        with MachineMeter() as meter:
            run_the_command()
        meter.usage     # MachineUsage(foreign_cpu=0.02, ...)

    The measurement is the tree of one process, which must outlive it. With `adopt_orphans`, the CPU time of
    all descendants that have ended is in the accounts of that process.

    Args:
        process: number of the root of the measurement's processes; None: this process.
        wall_clock: source of unix seconds.
        monotonic_clock: source of seconds that never jump.
        open_gpus: function that opens the reader of the GPUs; None from it: there is none.
    """

    def __init__(
        self,
        process: int | None = None,
        *,
        root: Path = Path("/"),
        interval_seconds: float = INTERVAL_SECONDS,
        wall_clock: Callable[[], float] = time.time,
        monotonic_clock: Callable[[], float] = time.monotonic,
        open_gpus: Callable[[], GpuReader | None] = open_gpu_reader,
    ) -> None:
        self._process = os.getpid() if process is None else process
        self._tree, self._files = TreeReader(self._process, root / "proc"), MachineFiles(root)
        self._root, self._interval_seconds = root, interval_seconds
        self._wall_clock, self._monotonic_clock = wall_clock, monotonic_clock
        self._open_gpus = open_gpus
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="machine-meter", daemon=True)
        self._failure: BaseException | None = None
        self._usage: MachineUsage | None = None
        self._own_seconds, self._peak_memory = 0.0, 0
        self._clocks: list[float] = []
        self._celsius: list[float] = []
        self._readings: list[UsageReading] = []
        self._is_gpu_throttled: bool | None = None
        self._clock_step = 0.0

    def __enter__(self) -> Self:
        self._gpus = self._open_gpus()
        self._throttles = self._files.throttle_count()
        self._offset = self._clock_offset()
        self._busy = self._files.busy_seconds_by_cpu()
        self._began = self._time = self._monotonic_clock()
        self._readings.append(self._reading(self._foreign_seconds(), []))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._failure is None:
            self.sample()
            self._usage = self._sum_up()
        if self._gpus is not None:
            self._gpus.close()
        if self._failure is not None and error is None:
            raise self._failure

    @property
    def usage(self) -> MachineUsage:
        """Return the state of the machine from the begin to the end of the measurement.

        Raises:
            RuntimeError: the meter still runs.
        """
        if self._usage is None:
            raise RuntimeError("the meter has not ended")
        return self._usage

    def utilization(self, start: float, end: float) -> Utilization:
        """Return the utilization of the machine between two unix times of the measurement."""
        return utilization_between(self._readings, start, end)

    def foreign_cpu(self, start: float, end: float) -> float | None:
        """Return the mean CPUs of other programs between two unix times, such as those of a step.

        Times between two samples are interpolated; None: the meter did not run, or the kernel does not tell.
        """
        return foreign_cpu_between(self._readings, start, end)

    def sample(self) -> None:
        """Take one sample; the thread does it each second."""
        now = self._monotonic_clock()
        seconds, self._time = now - self._time, now
        foreign = self._foreign_seconds()
        self._sample_clock(seconds)
        if (celsius := self._files.celsius()) is not None:
            self._celsius.append(celsius)
        gpus = [] if self._gpus is None else self._gpus.read()
        for gpu in gpus:
            self._celsius += [] if gpu.celsius is None else [gpu.celsius]
            if gpu.is_throttled is not None:
                self._is_gpu_throttled = bool(self._is_gpu_throttled) or gpu.is_throttled
        self._readings.append(self._reading(foreign, gpus))
        offset = self._clock_offset()
        self._clock_step = max(self._clock_step, abs(offset - self._offset))
        self._offset = offset

    def _run(self) -> None:
        try:
            wait = self._interval_seconds
            while not self._stop.wait(wait):
                began = time.thread_time()
                self.sample()
                wait = max(self._interval_seconds, (time.thread_time() - began) / MAX_COST)
        except BaseException as failure:
            self._failure = failure

    def _foreign_seconds(self) -> float | None:
        """Return the CPU seconds since boot of programs outside the measurement; None: they are unknown.

        They are at times less than before, because the kernel counts in hundredths.
        """
        busy, own = busy_cpu_seconds(self._root), self._read_tree()
        return None if busy is None else busy - own

    def _sample_clock(self, seconds: float) -> None:
        busy = self._files.busy_seconds_by_cpu()
        cpus = [
            cpu for cpu, used in busy.items() if used - self._busy.get(cpu, used) >= BUSY_SHARE * seconds > 0
        ]
        self._busy = busy
        if cpus and (hertz := self._files.clock_hertz(cpus)) is not None:
            self._clocks.append(hertz)

    def _read_tree(self) -> float:
        """Return the CPU seconds of the measurement, and keep its largest memory.

        A process that ends while the table is read is missing in it, and not yet in its parent's account: the
        sum is smaller than before, and is read again.
        """
        for _ in range(3):
            usage = self._tree.read()
            if usage is not None and usage.all.cpu_seconds >= self._own_seconds:
                memory = usage.all.memory_bytes
                if self._process == os.getpid():
                    memory -= usage.root.memory_bytes
                self._own_seconds = usage.all.cpu_seconds
                self._peak_memory = max(self._peak_memory, memory)
                break
        return self._own_seconds

    def _reading(self, foreign: float | None, gpus: Sequence[GpuReading]) -> UsageReading:
        return UsageReading(
            self._wall_clock(),
            self._own_seconds,
            self._files.network_bytes(),
            self._files.disk_bytes(),
            [gpu.utilization for gpu in gpus if gpu.utilization is not None],
            max((gpu.memory_bytes for gpu in gpus if gpu.memory_bytes is not None), default=None),
            foreign,
        )

    def _clock_offset(self) -> float:
        """Return unix time less monotonic time, from the one of several readings with the least delay."""
        readings = []
        for _ in range(3):
            before, wall, after = self._monotonic_clock(), self._wall_clock(), self._monotonic_clock()
            readings.append((after - before, wall - (before + after) / 2))
        return min(readings)[1]

    def _sum_up(self) -> MachineUsage:
        seconds = self._time - self._began
        first, last = self._readings[0].foreign_seconds, self._readings[-1].foreign_seconds
        foreign = None
        if first is not None and last is not None and seconds > 0:
            foreign = max((last - first) / seconds, 0.0)
        throttles = self._files.throttle_count()
        is_cpu_throttled = (
            None if throttles is None or self._throttles is None else throttles > self._throttles
        )
        known = [flag for flag in (self._is_gpu_throttled, is_cpu_throttled) if flag is not None]
        return MachineUsage(
            foreign_cpu=foreign,
            clock_hertz=(min(self._clocks), sum(self._clocks) / len(self._clocks)) if self._clocks else None,
            max_celsius=max(self._celsius, default=None),
            is_throttled=any(known) if known else None,
            clock_step_seconds=self._clock_step,
            peak_memory_bytes=self._peak_memory or None,
        )
