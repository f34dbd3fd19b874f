"""Observer of a contender's record of its steps, from outside.

It kills one rank and computes the cost, or measures the processor time of other processes in the meantime.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import BenchmarkError

POLL_SECONDS = 0.005
UNUSUAL = 5
"""First steps that do not count for the time of a step."""


@dataclass(frozen=True)
class Step:
    """Finished optimizer step, as a contender recorded it; a repeated one is another `Step`."""

    step: int
    time: float
    """Unix time in seconds."""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file of JSON objects; none if the file does not exist yet."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def step_seconds(steps: Sequence[Step]) -> float:
    """Return the median seconds between the ends of consecutive steps, without the first ones.

    Raises:
        BenchmarkError: there are too few.
    """
    times = [step.time for step in steps][UNUSUAL:]
    if len(times) < 2:
        raise BenchmarkError(f"{len(steps)} steps are too few to know how long one takes; kill later")
    return statistics.median(after - before for before, after in itertools.pairwise(times))


class Watch(threading.Thread):
    """Thread that follows `progress` and kills a process half a step after step `kill_after` is recorded.

    Every recorded step is kept, even if the contender later drops it to repeat it.

    Args:
        progress: file of rank 0's steps.
        victim: returns the process to be killed; called when it is due.
    """

    def __init__(self, progress: Path, kill_after: int, victim: Callable[[], int]) -> None:
        super().__init__(daemon=True)
        self._progress, self._kill_after, self._victim = progress, kill_after, victim
        self._lines: dict[tuple[int, float], dict[str, Any]] = {}
        self._seen: tuple[int, ...] = ()
        self._over = threading.Event()
        self._error: Exception | None = None
        self.killed: float | None = None
        """Unix time right before the signal."""

    def run(self) -> None:
        try:
            while not self._over.wait(POLL_SECONDS):
                if self._look() and self.killed is None:
                    self._strike_when_due()
            self._look()
        except Exception as error:
            self._error = error

    def finish(self) -> list[dict[str, Any]]:
        """Return all lines in the order of time, after the contender has ended.

        Raises:
            BenchmarkError: no process was killed.
        """
        self._over.set()
        self.join()
        if self._error is not None:
            raise BenchmarkError(f"watching {self._progress}: {self._error!r}") from self._error
        if self.killed is None:
            raise BenchmarkError(f"nobody was killed: {self._progress} never had step {self._kill_after}")
        return sorted(self._lines.values(), key=lambda line: float(line["time"]))

    def _look(self) -> bool:
        """Read new lines; return True if the file has changed."""
        try:
            found = self._progress.stat()
        except FileNotFoundError:
            return False
        seen = (found.st_ino, found.st_size, found.st_mtime_ns)
        if seen == self._seen:
            return False
        self._seen = seen
        self._lines |= {(line["step"], line["time"]): line for line in read_lines(self._progress)}
        return True

    def _strike_when_due(self) -> None:
        steps = [Step(*key) for key in self._lines]
        if steps and steps[-1].step >= self._kill_after:
            time.sleep(step_seconds(steps) / 2)
            self.killed = time.time()
            os.kill(self._victim(), signal.SIGKILL)


class ProcessorTime(threading.Thread):
    """Thread that measures processor time of some processes from the end of one step to that of another.

    Args:
        progress: file of rank 0's steps.
        processes: returns the processes by name; called at the first of the two.
    """

    def __init__(
        self, progress: Path, first: int, last: int, processes: Callable[[], Mapping[str, int]]
    ) -> None:
        super().__init__(daemon=True)
        self._progress, self._steps, self._processes = progress, (first, last), processes
        self._taken: list[tuple[float, dict[str, float]]] = []
        self._over = threading.Event()
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            found: dict[str, psutil.Process] = {}
            for due in self._steps:
                while not any(line["step"] >= due for line in read_lines(self._progress)[-1:]):
                    if self._over.wait(10 * POLL_SECONDS):
                        return
                found = found or {name: psutil.Process(pid) for name, pid in self._processes().items()}
                self._taken.append((time.monotonic(), {name: _seconds(one) for name, one in found.items()}))
        except Exception as error:
            self._error = error

    def finish(self) -> dict[str, float]:
        """Return the seconds of one processor per second, by name.

        Raises:
            BenchmarkError: the steps did not come, or the processes could not be measured.
        """
        self._over.set()
        self.join()
        if self._error is not None or len(self._taken) < 2:
            raise BenchmarkError(f"watching {self._progress}: {self._error or 'it ended too early'!r}")
        (began, before), (ended, after) = self._taken
        return {name: (after[name] - before[name]) / (ended - began) for name in before}


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def cost(lines: Sequence[Mapping[str, Any]], killed: float, resumed: float) -> dict[str, Any]:
    """Return the cost of the death of a rank.

    Args:
        lines: lines of rank 0's record, in time; those with `committed` false are no steps.
        killed: time of the kill.
        resumed: time from which the steps are those of the continued run. A step that ends between the two
            was finished by ranks that had all they needed of the dead one, before they noticed.

    Returns:
        `new_step_seconds` from the kill to the end of the first step that had not been finished before,
        `first_step_seconds` to the end of the first one of any kind, `repeated_steps` between the two, and
        `step_seconds` of a step before.

    Raises:
        BenchmarkError: there was no step before or no new one afterwards.
    """
    steps = [Step(line["step"], line["time"]) for line in lines if line.get("committed", True)]
    before = [step for step in steps if step.time < resumed]
    after = [step for step in steps if step.time >= resumed]
    reached = max((step.step for step in before), default=0)
    new = next((step for step in after if step.step > reached), None)
    if not before or new is None:
        raise BenchmarkError(f"no step after step {reached}, in which a rank was killed; train for longer")
    if (first := after[0].step) > reached + 1:
        raise BenchmarkError(f"after the failure the record goes on with step {first}, not {reached + 1}")
    return {
        "new_step_seconds": round(new.time - killed, 4),
        "first_step_seconds": round(after[0].time - killed, 4),
        "repeated_steps": reached - (after[0].step - 1),
        "step_seconds": round(step_seconds([step for step in before if step.time <= killed]), 4),
    }
