"""Supervisor's handle of one worker process."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from wanma.elastic.detection.hang_report import parse_stack_dump
from wanma.elastic.protocol.local_messages import CollectiveStateReport, WorkerSpec
from wanma.elastic.protocol.messages import (
    Message,
    RankStatus,
)
from wanma.elastic.transport.connection import Connection
from wanma.elastic.transport.event_loop import EventLoop
from wanma.elastic.workers.linux_processes import process_state
from wanma.elastic.workers.progress_board import ProgressBoard


class WorkerHandle:
    """Worker process: its channel, the file for its stacks, and its state."""

    def __init__(
        self, spec: WorkerSpec, loop: EventLoop, on_message: Callable[[WorkerHandle, Message], None]
    ) -> None:
        self.spec = spec
        self.pid: int | None = None
        self._started_at = time.monotonic()
        self.exit_code: int | None = None
        """Exit code, negative for a signal; None while it lives."""
        self.is_finished = False
        self.is_suspending = False
        """True if it leaves suspended, with an in-memory checkpoint."""
        self.has_reported_end = False
        """True if it has reported the end of its work, good or bad."""
        self.collective_state = CollectiveStateReport("")
        parent_socket, self.child_socket = socket.socketpair()
        self.stack_file = os.memfd_create("wanma-stacks", os.MFD_CLOEXEC)
        # The fork server reports its end, so a closed channel as such means nothing.
        self.connection = Connection(
            loop,
            parent_socket,
            f"rank {spec.rank}",
            lambda message: on_message(self, message),
            lambda _reason: None,
        )
        self.connection.framer.generation = spec.generation

    @property
    def has_exited(self) -> bool:
        return self.exit_code is not None

    def read_status(self, board: ProgressBoard, hostname: str, now: float) -> RankStatus:
        """Return its status, after it has been asked."""
        position = board.read_progress(self.spec.local_rank)
        reported = position.report_count > 0
        dump = os.pread(self.stack_file, os.fstat(self.stack_file).st_size, 0).decode(errors="replace")
        return RankStatus(
            rank=self.spec.rank,
            node_rank=self.spec.node_rank,
            hostname=hostname,
            step=position.step if reported else None,
            phase=position.phase if reported else "",
            silent_seconds=now - (position.reported_at if reported else self._started_at),
            process_state=process_state(self.pid) if self.pid is not None else "not started",
            stack=parse_stack_dump(dump, position.main_thread if reported else 0),
            current_collective=self.collective_state.current_collective,
            recent_collectives=self.collective_state.recent_collectives,
        )

    def close(self) -> None:
        self.connection.close()
        self.child_socket.close()
        os.close(self.stack_file)
