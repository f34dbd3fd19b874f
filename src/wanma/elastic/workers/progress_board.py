"""Where every rank of a node stands: a page of shared memory that ranks write and the supervisor reads.

Writing costs about a microsecond and no system call beyond the clock, so the loop may report as
often as it likes. The same page carries the supervisor's request to stop, or to pause.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from dataclasses import dataclass

from wanma.job.run.worker import OUTSIDE

_HEAD_BYTES = 64
_SLOT_BYTES = 192
_SLOT = struct.Struct("<QqQqQQQ?48sQ")
"""calls, step, changes of step, step done, when it was done and time in nanoseconds, main thread, whether it
is leaving, phase, calls again: a reader that sees the two counts differ has caught a write half-way and
reads again."""
_WORK = struct.Struct("<QqddQ")
"""steps, group, seconds of waiting for data and of computing in all of them, steps again."""
_WORK_OFFSET = 128
"""In a slot."""
_UNTIL = struct.Struct("<d")
_UNTIL_OFFSET = 8
"""In the head, of the time until which ranks that stop have to be gone; 0: no such time."""
_NO_STEP = -1
_PHASE_BYTES = 48


@dataclass(frozen=True)
class Position:
    """One rank's last report."""

    calls: int
    """Reports so far; 0: none yet, and then the other fields mean nothing."""
    step: int
    step_changes: int
    """How often the step was another than in the report before."""
    done: int | None
    """The newest step that this process finished; None: none yet."""
    done_seconds: float
    """When that was, as `seconds`; 0: never."""
    leaving: bool
    """All ranks have agreed to stop: it saves, and ends."""
    phase: str
    seconds: float
    """When, on this machine's monotonic clock."""
    main_thread: int
    """Identity of the thread that reported."""

    @property
    def is_outside(self) -> bool:
        """It has no session open: it never spoke, or has closed the one that it had."""
        return self.calls == 0 or self.phase == OUTSIDE


@dataclass(frozen=True)
class Work:
    """What one rank has taken for itself since its process began, without waiting for other ranks."""

    steps: int
    group: int
    """Ranks of the same number have the same to do."""
    data_seconds: float
    compute_seconds: float


class Board:
    """The page; made by the supervisor, opened by each worker from the inherited descriptor."""

    def __init__(self, descriptor: int, ranks: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _HEAD_BYTES + ranks * _SLOT_BYTES)

    @classmethod
    def create(cls, ranks: int) -> Board:
        descriptor = os.memfd_create("wanma-board", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _HEAD_BYTES + ranks * _SLOT_BYTES)
        return cls(descriptor, ranks)

    def request_stop(self, until: float | None = None) -> None:
        """Ask the ranks to stop in order.

        Args:
            until: when they have to be gone, on the monotonic clock.
        """
        _UNTIL.pack_into(self._memory, _UNTIL_OFFSET, until or 0.0)
        self._memory[0] = 1

    def stop_requested(self) -> bool:
        return self._memory[0] == 1

    def request_pause(self) -> None:
        self._memory[1] = 1

    def pause_requested(self) -> bool:
        return self._memory[1] == 1

    def stop_until(self) -> float | None:
        """When the ranks have to be gone, as in `request_stop`; None: nobody has said so."""
        return float(_UNTIL.unpack_from(self._memory, _UNTIL_OFFSET)[0]) or None

    def writer(self, local_rank: int) -> BoardWriter:
        return BoardWriter(self._memory, _HEAD_BYTES + local_rank * _SLOT_BYTES)

    def read(self, local_rank: int) -> Position:
        offset = _HEAD_BYTES + local_rank * _SLOT_BYTES
        for _ in range(100):
            calls, step, changes, done, done_at, at, thread, leaving, phase, check = _SLOT.unpack_from(
                self._memory, offset
            )
            if calls == check:
                break
        name = phase.rstrip(b"\0").decode(errors="ignore")
        finished = done if calls and done != _NO_STEP else None
        return Position(calls, step, changes, finished, done_at / 1e9, leaving, name, at / 1e9, thread)

    def work(self, local_rank: int) -> Work:
        """What a rank has done so far."""
        offset = _HEAD_BYTES + local_rank * _SLOT_BYTES + _WORK_OFFSET
        for _ in range(100):
            steps, group, data_seconds, compute_seconds, check = _WORK.unpack_from(self._memory, offset)
            if steps == check:
                break
        return Work(steps, group, data_seconds, compute_seconds)

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)


class BoardWriter:
    """One rank's line on the board."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._memory, self._offset = memory, offset
        self._calls = self._changes = 0
        self._step: int | None = None
        self._done = _NO_STEP
        self._done_at = 0
        self._leaving = False
        self._steps = 0
        self._data_seconds = self._compute_seconds = 0.0

    def worked(self, group: int, data_seconds: float, compute_seconds: float) -> None:
        """Add what a step took."""
        self._steps += 1
        self._data_seconds += data_seconds
        self._compute_seconds += compute_seconds
        _WORK.pack_into(
            self._memory,
            self._offset + _WORK_OFFSET,
            self._steps,
            group,
            self._data_seconds,
            self._compute_seconds,
            self._steps,
        )

    def step_done(self, step: int) -> None:
        self._done, self._done_at = step, time.monotonic_ns()
        self.write(step, "step done")

    def leave(self, step: int) -> None:
        self._leaving = True
        self.write(step, "stopping")

    def write(self, step: int, phase: str) -> None:
        self._calls += 1
        if step != self._step:
            self._changes += self._step is not None
            self._step = step
        _SLOT.pack_into(
            self._memory,
            self._offset,
            self._calls,
            step,
            self._changes,
            self._done,
            self._done_at,
            time.monotonic_ns(),
            threading.get_ident(),
            self._leaving,
            phase.encode()[:_PHASE_BYTES],
            self._calls,
        )
