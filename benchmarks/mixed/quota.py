"""A process held to a share of a core, by the kernel's own means (cgroups v1)."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common import BenchmarkError
from wanma.job.run.run_directory import RunDirectory

ROOT = Path("/sys/fs/cgroup/cpu")
PERIOD_MICROSECONDS = 10_000
"""In which the kernel gives out a quota: so short that a rank is slower, and not away for part of a step."""
POLL_SECONDS = 0.02


def why_no_quotas() -> str | None:
    """Why quotas cannot be set here; None where they can."""
    if not ROOT.is_dir() or not os.access(ROOT, os.W_OK):
        return f"{ROOT} is no cgroup that this user may write: run as root, on a kernel with cgroups v1"
    return None


@contextlib.contextmanager
def held_back(run: RunDirectory, rank: int, percent: int, *, after_step: int = 0) -> Iterator[Held]:
    """While inside, hold `rank` of a run that starts meanwhile to a share of a core."""
    group = ROOT / f"wanma-bench-{os.getpid()}-{rank}"
    group.mkdir()
    held = Held(group, run, rank, percent, after_step)
    held.start()
    try:
        yield held
    finally:
        held.finish()
        _remove(group)


class Held(threading.Thread):
    """Puts the rank's process into the group as soon as its log names it, and sets the quota when it is due.

    Attributes:
        since: Unix time at which the quota held; None before.
    """

    def __init__(self, group: Path, run: RunDirectory, rank: int, percent: int, after_step: int) -> None:
        super().__init__(daemon=True)
        self._group, self._run, self._rank = group, run, rank
        self._percent, self._after_step = percent, after_step
        self._over = threading.Event()
        self.since: float | None = None

    def run(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            if (process := self._process()) is not None:
                (self._group / "cgroup.procs").write_text(str(process))
                break
        while not self._over.wait(POLL_SECONDS):
            if self._after_step == 0 or self._done() >= self._after_step:
                quota = PERIOD_MICROSECONDS * self._percent // 100
                (self._group / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
                (self._group / "cpu.cfs_quota_us").write_text(str(quota))
                self.since = time.time()
                return

    def finish(self) -> None:
        self._over.set()
        self.join()

    def _process(self) -> int | None:
        """A rank's log begins with its process."""
        try:
            found = re.search(r"process (\d+)", self._run.log(self._rank).read_text())
        except FileNotFoundError:
            return None
        return int(found[1]) if found else None

    def _done(self) -> int:
        try:
            return self._run.metrics.read_text().count("\n")
        except FileNotFoundError:
            return 0


def _remove(group: Path) -> None:
    """Once its last process is gone from it."""
    for _ in range(200):
        try:
            group.rmdir()
        except OSError:
            time.sleep(POLL_SECONDS)
        else:
            return
    raise BenchmarkError(f"{group} still holds processes; end them and remove it")
