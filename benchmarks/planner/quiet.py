"""Record of the times at which other programs left this machine alone."""

from __future__ import annotations

import threading
import time
from types import TracebackType

import psutil

from wanma.hardware.discovery.cpu_load import busy_cpu_seconds

STRETCH_SECONDS = 0.25


class Watch:
    """Recorder of the CPUs that other programs use in every quarter of a second, while it is entered."""

    def __init__(self) -> None:
        self._stretches: list[tuple[float, float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="quiet-watch")

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def others(self, start: float, stop: float) -> float:
        """Return the mean CPUs used by others from `start` to `stop` (Unix seconds); infinite if unknown."""
        inside = [one for one in self._stretches if one[1] > start and one[0] < stop]
        if not inside or inside[0][0] > start or inside[-1][1] < stop:
            return float("inf")
        return sum(cpus * (end - begin) for begin, end, cpus in inside) / (inside[-1][1] - inside[0][0])

    def _run(self) -> None:
        own, busy, then = _own(), busy_cpu_seconds() or 0.0, time.time()
        while not self._over.wait(STRETCH_SECONDS):
            new_own, new_busy, now = _own(), busy_cpu_seconds() or 0.0, time.time()
            mine = sum(seconds - own.get(process, 0.0) for process, seconds in new_own.items())
            self._stretches.append((then, now, max(new_busy - busy - mine, 0.0) / (now - then)))
            own, busy, then = new_own, new_busy, now


def _own() -> dict[int, float]:
    """Return the CPU seconds of this process and its descendants, by process."""
    me = psutil.Process()
    found = {}
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        found[process.pid] = times.user + times.system
    return found
