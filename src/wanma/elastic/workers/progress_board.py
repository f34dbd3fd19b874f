"""Progress board of a node: page of shared memory that ranks write and the supervisor reads.

Writing costs about a microsecond and no system call beyond the clock, so the loop may report as often as it
likes. The same page carries the supervisor's request to drain, to suspend, or to profile.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from dataclasses import dataclass

from wanma.job.run.worker import OUTSIDE_SESSION_PHASE, StepWork

_HEAD_BYTES = 64
_SLOT_BYTES = 192
_SLOT = struct.Struct("<QqQqQQQ?48sQ")
"""Layout of a rank's slot.

Calls, step, changes of step, finished step, its time and the time of the report in nanoseconds, main thread,
whether it is leaving, phase, calls again: a reader that sees the two counts differ has read during a write
and reads again.
"""
_WORK = struct.Struct("<QqddQQQ")
"""Layout of a rank's work: steps, group, seconds of data loading and of computation, cached bytes, allocation
retries, steps again."""
_WORK_OFFSET = 128
"""Offset of the work in a slot."""
_KILL_DEADLINE = struct.Struct("<d")
_KILL_DEADLINE_OFFSET = 8
"""Offset, in the head, of the deadline for ranks that stop; the value 0 means none."""
_NO_STEP = -1
_PHASE_BYTES = 48


@dataclass(frozen=True)
class RankProgress:
    """Last report of one rank."""

    report_count: int
    """Number of reports so far; 0: none yet, and then the other fields mean nothing."""
    step: int
    step_change_count: int
    """Number of reports whose step differed from that of the report before."""
    last_finished_step: int | None
    """Newest step that this process finished; None: none yet."""
    finished_at: float
    """Time at which it finished, as `reported_at`; 0: never."""
    is_draining: bool
    """True if all ranks have agreed to stop: the rank saves, and ends."""
    phase: str
    reported_at: float
    """Time of the report on this node's monotonic clock."""
    main_thread: int
    """Identity of the thread that reported."""

    @property
    def is_outside_session(self) -> bool:
        """True if the rank has no session open: it never reported, or has closed its session."""
        return self.report_count == 0 or self.phase == OUTSIDE_SESSION_PHASE


@dataclass(frozen=True)
class ReportedWork(StepWork):
    """Work of one rank since its process began; its seconds are sums over all steps."""

    steps: int


class ProgressBoard:
    """Progress board; made by the supervisor, opened by each worker from the inherited descriptor."""

    def __init__(self, descriptor: int, ranks: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _HEAD_BYTES + ranks * _SLOT_BYTES)

    @classmethod
    def create(cls, ranks: int) -> ProgressBoard:
        descriptor = os.memfd_create("wanma-board", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _HEAD_BYTES + ranks * _SLOT_BYTES)
        return cls(descriptor, ranks)

    def request_drain(self, kill_deadline: float | None = None) -> None:
        """Request an orderly stop of the ranks.

        Args:
            kill_deadline: deadline for the ranks, on the monotonic clock.
        """
        _KILL_DEADLINE.pack_into(self._memory, _KILL_DEADLINE_OFFSET, kill_deadline or 0.0)
        self._memory[0] = 1

    def is_drain_requested(self) -> bool:
        return self._memory[0] == 1

    def request_suspend(self) -> None:
        self._memory[1] = 1

    def is_suspend_requested(self) -> bool:
        return self._memory[1] == 1

    def request_profile(self, number: int) -> None:
        """Pass on the number of a request for a profile, 0 .. 255."""
        self._memory[2] = number

    def profile_request(self) -> int:
        return self._memory[2]

    def kill_deadline(self) -> float | None:
        """Return the deadline for the ranks, as in `request_drain`; None: there is none."""
        return float(_KILL_DEADLINE.unpack_from(self._memory, _KILL_DEADLINE_OFFSET)[0]) or None

    def writer(self, local_rank: int) -> ProgressWriter:
        return ProgressWriter(self._memory, _HEAD_BYTES + local_rank * _SLOT_BYTES)

    def read_progress(self, local_rank: int) -> RankProgress:
        offset = _HEAD_BYTES + local_rank * _SLOT_BYTES
        for _ in range(100):
            calls, step, changes, done, done_at, at, thread, leaving, phase, check = _SLOT.unpack_from(
                self._memory, offset
            )
            if calls == check:
                break
        name = phase.rstrip(b"\0").decode(errors="ignore")
        finished = done if calls and done != _NO_STEP else None
        return RankProgress(calls, step, changes, finished, done_at / 1e9, leaving, name, at / 1e9, thread)

    def read_work(self, local_rank: int) -> ReportedWork:
        """Return the work of a rank so far."""
        offset = _HEAD_BYTES + local_rank * _SLOT_BYTES + _WORK_OFFSET
        for _ in range(100):
            steps, group, data, compute, cached, retries, check = _WORK.unpack_from(self._memory, offset)
            if steps == check:
                break
        return ReportedWork(group, data, compute, cached, retries, steps)

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)


class ProgressWriter:
    """Writer of one rank's slot on the board."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._memory, self._offset = memory, offset
        self._calls = self._step_changes = 0
        self._step: int | None = None
        self._finished_step = _NO_STEP
        self._finished_at = 0
        self._is_draining = False
        self._steps = 0
        self._data_seconds = self._compute_seconds = 0.0

    def report_work(self, work: StepWork) -> None:
        """Add the work of a step to the rank's."""
        self._steps += 1
        self._data_seconds += work.data_seconds
        self._compute_seconds += work.compute_seconds
        _WORK.pack_into(
            self._memory,
            self._offset + _WORK_OFFSET,
            self._steps,
            work.peer_group,
            self._data_seconds,
            self._compute_seconds,
            work.cached_bytes,
            work.allocation_retries,
            self._steps,
        )

    def report_finished_step(self, step: int) -> None:
        self._finished_step, self._finished_at = step, time.monotonic_ns()
        self.report_progress(step, "step done")

    def report_drain(self, step: int) -> None:
        self._is_draining = True
        self.report_progress(step, "stopping")

    def report_progress(self, step: int, phase: str) -> None:
        self._calls += 1
        if step != self._step:
            self._step_changes += self._step is not None
            self._step = step
        _SLOT.pack_into(
            self._memory,
            self._offset,
            self._calls,
            step,
            self._step_changes,
            self._finished_step,
            self._finished_at,
            time.monotonic_ns(),
            threading.get_ident(),
            self._is_draining,
            phase.encode()[:_PHASE_BYTES],
            self._calls,
        )
