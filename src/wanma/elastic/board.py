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

_HEAD_BYTES = 64
_SLOT_BYTES = 128
_SLOT = struct.Struct("<QqQqQQ48sQ")
"""calls, step, changes of step, step done, time in nanoseconds, main thread, phase, calls again: a reader
that sees the two counts differ has caught a write half-way and reads again."""
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
    phase: str
    seconds: float
    """When, on this machine's monotonic clock."""
    main_thread: int
    """Identity of the thread that reported."""


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

    def request_stop(self) -> None:
        self._memory[0] = 1

    def stop_requested(self) -> bool:
        return self._memory[0] == 1

    def request_pause(self) -> None:
        self._memory[1] = 1

    def pause_requested(self) -> bool:
        return self._memory[1] == 1

    def writer(self, local_rank: int) -> BoardWriter:
        return BoardWriter(self._memory, _HEAD_BYTES + local_rank * _SLOT_BYTES)

    def read(self, local_rank: int) -> Position:
        offset = _HEAD_BYTES + local_rank * _SLOT_BYTES
        for _ in range(100):
            calls, step, changes, done, nanoseconds, thread, phase, check = _SLOT.unpack_from(
                self._memory, offset
            )
            if calls == check:
                break
        name = phase.rstrip(b"\0").decode(errors="ignore")
        finished = done if calls and done != _NO_STEP else None
        return Position(calls, step, changes, finished, name, nanoseconds / 1e9, thread)

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

    def step_done(self, step: int) -> None:
        self._done = step
        self.write(step, "step done")

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
            time.monotonic_ns(),
            threading.get_ident(),
            phase.encode()[:_PHASE_BYTES],
            self._calls,
        )
