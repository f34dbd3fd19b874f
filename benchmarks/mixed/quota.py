"""CPU quota of a process, as a share of a core, set by the kernel (cgroups v1)."""

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
"""Period of the kernel's quota: so short that a rank is slow, and not stopped within a step."""
POLL_SECONDS = 0.02


def why_no_quotas() -> str | None:
    """Return the reason why quotas cannot be set here; None if they can."""
    if not ROOT.is_dir() or not os.access(ROOT, os.W_OK):
        return f"{ROOT} is no cgroup that this user may write: run as root, on a kernel with cgroups v1"
    return None


@contextlib.contextmanager
def held_back(run: RunDirectory, rank: int, percent: int, *, after_step: int = 0) -> Iterator[Held]:
    """Limit `rank` of a run, which starts while inside, to a share of a core."""
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
    """Thread that moves the rank's process into the group once its log names it, and sets the quota on time.

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
        """Return the process of the rank, with which its log begins; None before."""
        try:
            found = re.search(r"process (\d+)", self._run.rank_log(self._rank).read_text())
        except FileNotFoundError:
            return None
        return int(found[1]) if found else None

    def _done(self) -> int:
        try:
            return self._run.metrics.read_text().count("\n")
        except FileNotFoundError:
            return 0


def _remove(group: Path) -> None:
    """Remove the group once its last process has left it."""
    for _ in range(200):
        try:
            group.rmdir()
        except OSError:
            time.sleep(POLL_SECONDS)
        else:
            return
    raise BenchmarkError(f"{group} still holds processes; end them and remove it")
