"""Supervisor's handle of one worker process."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from wanma.elastic.diagnosis.hang_report import main_thread_stack
from wanma.elastic.protocol.local_messages import Whereabouts, WorkerSpec
from wanma.elastic.protocol.messages import (
    Message,
    Standing,
)
from wanma.elastic.transport.connection import Connection
from wanma.elastic.transport.event_loop import Loop
from wanma.elastic.workers.linux_processes import process_state
from wanma.elastic.workers.progress_board import Board


class LocalRank:
    """Worker process: its channel, the file for its stacks, and its state."""

    def __init__(
        self, spec: WorkerSpec, loop: Loop, on_message: Callable[[LocalRank, Message], None]
    ) -> None:
        self.spec = spec
        self.pid: int | None = None
        self._born = time.monotonic()
        self.code: int | None = None
        """Exit code, negative for a signal; None while it lives."""
        self.finished = False
        self.pausing = False
        """True if it leaves suspended, with an in-memory checkpoint."""
        self.spoke = False
        """True if it has reported the end of its work, good or bad."""
        self.whereabouts = Whereabouts("")
        mine, self.child = socket.socketpair()
        self.stacks = os.memfd_create("wanma-stacks", os.MFD_CLOEXEC)
        # The fork server reports its end, so a closed channel as such means nothing.
        self.connection = Connection(
            loop, mine, f"rank {spec.rank}", lambda message: on_message(self, message), lambda _reason: None
        )
        self.connection.framer.generation = spec.generation

    @property
    def gone(self) -> bool:
        return self.code is not None

    def standing(self, board: Board, host: str, now: float) -> Standing:
        """Return its status, after it has been asked."""
        position = board.read(self.spec.local_rank)
        reported = position.calls > 0
        dump = os.pread(self.stacks, os.fstat(self.stacks).st_size, 0).decode(errors="replace")
        return Standing(
            rank=self.spec.rank,
            node=self.spec.node_rank,
            host=host,
            step=position.step if reported else None,
            phase=position.phase if reported else "",
            silent_seconds=now - (position.seconds if reported else self._born),
            state=process_state(self.pid) if self.pid is not None else "not started",
            stack=main_thread_stack(dump, position.main_thread if reported else 0),
            collective=self.whereabouts.collective,
            recent=self.whereabouts.recent,
        )

    def close(self) -> None:
        self.connection.close()
        self.child.close()
        os.close(self.stacks)
