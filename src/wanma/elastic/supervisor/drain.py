"""Drain of one node: deadlines from the stop command to the kill that follows it.

The ranks are asked to stop after their step, and save. If that will not end in time, the node reports it
(`DrainTimeoutReport`), and the coordinator ends all ranks and asks the nodes to flush their in-memory
checkpoints (`FlushCommand`, `elastic/recovery/flush_process.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from wanma.elastic.launch_config import LaunchConfig
from wanma.elastic.protocol.messages import DrainCommand, DrainTimeoutReport, FlushCommand, Message
from wanma.elastic.recovery.flush_deadline import (
    StepTimeEstimate,
    compute_drain_end,
    compute_step_abandon_time,
)
from wanma.elastic.recovery.flush_process import FlushProcess, FlushTask
from wanma.elastic.recovery.in_memory_checkpoint_files import InMemoryCheckpointFiles
from wanma.elastic.supervisor.worker_group import WorkerGroup
from wanma.elastic.transport.event_loop import EventLoop
from wanma.observe.units import duration_text

FLUSH_REPORT_SECONDS = 0.5
"""Time, in seconds, to learn the results of the other nodes' flushes."""


class DrainController:
    """Drain controller of one node.

    Args:
        launch: launch configuration.
        loop: event loop.
        memory_files: files of the ranks' in-memory checkpoints; None: there are none.
        send: sends a message to the coordinator.
        notify: shows a text to the user of this node.
        on_timeout: called when the node has to leave as it is.
    """

    def __init__(
        self,
        launch: LaunchConfig,
        loop: EventLoop,
        memory_files: InMemoryCheckpointFiles | None,
        send: Callable[[Message], None],
        notify: Callable[[str], None],
        on_timeout: Callable[[], None],
    ) -> None:
        self._launch, self._loop, self._memory_files = launch, loop, memory_files
        self._send, self._notify, self._on_timeout = send, notify, on_timeout
        self.kill_deadline: float | None = None
        """Time of the kill; None: no kill was announced."""
        self._worker_group: WorkerGroup | None = None
        self._step_time = StepTimeEstimate()
        self._flush_process: FlushProcess | None = None
        self._is_departure = False
        """True if this node may leave a run that continues: then it need not write its state."""

    def attach_workers(self, worker_group: WorkerGroup) -> None:
        """Watch the ranks of a generation, once they exist."""
        self._worker_group, self._step_time = worker_group, StepTimeEstimate()
        if self.kill_deadline is not None:
            self._check_deadline(worker_group)

    def update_step_time(self, worker_group: WorkerGroup) -> None:
        """Update the estimate of a step's time; called every now and then."""
        self._step_time.update(worker_group.read_progress())

    def begin(self, command: DrainCommand) -> bool:
        """Process a stop command of the run, and return True if it brings a new deadline."""
        was_departure, self._is_departure = self._is_departure, False
        is_new = command.grace_seconds is not None and self._set_deadline(command.grace_seconds)
        if was_departure and not is_new and self._worker_group is not None:
            self._check_deadline(self._worker_group)  # from now on, time to write is reserved
        return is_new

    def begin_departure(self, grace_seconds: float) -> None:
        """Note the kill that follows a signal to this node, which asks to leave an elastic run."""
        self._is_departure = True
        self._set_deadline(grace_seconds)

    def _set_deadline(self, grace_seconds: float) -> bool:
        """Set the time of the kill; return False if about the same one is known."""
        deadline = time.monotonic() + grace_seconds
        if (
            self.kill_deadline is not None and deadline >= self.kill_deadline - 1.0
        ):  # each node's own order, about the same
            return False
        self.kill_deadline = deadline
        self._loop.call_later(
            compute_drain_end(deadline) - time.monotonic(), lambda: self._handle_kill_deadline(deadline)
        )
        if self._worker_group is not None:
            self._check_deadline(self._worker_group)
        return True

    def start_flush(self, command: FlushCommand, generation: int) -> None:
        """Flush the in-memory checkpoints that the command names; the answer goes to the coordinator."""
        assert self._memory_files is not None
        paths = self._memory_files.get_restore_paths(command.checkpoint_id)
        if self._flush_process is not None:
            self._flush_process.close()
        names = [f"{generation}-rescue-{number}" for number in range(1, command.attempt + 1)]
        if not command.is_run_failed and command.attempt == 1:
            folder = self._launch.run_directory / "checkpoints"
            self._notify(
                f"flushing the in-memory checkpoint of step {command.checkpoint_id.step:,} to {folder}: "
                f"{duration_text(command.timeout_seconds)} until SIGKILL"
            )
        self._flush_process = FlushProcess(
            FlushTask(
                run_directory=str(self._launch.run_directory),
                memory_file_paths={str(rank): paths[str(rank)][0] for rank in command.assigned_ranks},
                world_size=command.world_size,
                save_name=names[-1],
                abandoned_saves=tuple(names[:-1]),
                writes_partial_checkpoint=command.writes_partial_checkpoint,
                deadline=compute_drain_end(time.monotonic() + command.timeout_seconds) - FLUSH_REPORT_SECONDS,
                checkpoint_upload_url=self._launch.checkpoint_upload_url,
                is_run_failed=command.is_run_failed,
            ),
            self._loop,
            lambda answer: self._send(replace(answer, attempt=command.attempt)),
        )

    def close(self) -> None:
        """End a flush in progress."""
        self._worker_group = None
        if self._flush_process is not None:
            self._flush_process.close()
            self._flush_process = None

    def _check_deadline(self, worker_group: WorkerGroup) -> None:
        """Report `DrainTimeoutReport` if the current step will not end in time; else check again later."""
        if (
            worker_group is not self._worker_group
            or worker_group.has_exited
            or self.kill_deadline is None
            or self._flush_process is not None
        ):
            return
        positions = worker_group.read_progress()
        self._step_time.update(positions)
        copies = self._memory_files.measure_checkpoint_bytes() if self._memory_files is not None else 0
        if not copies or any(position.is_draining for position in positions):
            return  # there is nothing else to write, or the ranks are saving
        now = time.monotonic()
        places = 0 if self._is_departure else 2 if self._launch.checkpoint_upload_url is not None else 1
        at = compute_step_abandon_time(
            now, self.kill_deadline, copies, self._step_time.step_start, self._step_time.step_seconds, places
        )
        if at <= now:
            self._send(DrainTimeoutReport())
        else:
            self._loop.call_later(at - now, lambda: self._check_deadline(worker_group))

    def _handle_kill_deadline(self, kill_deadline: float) -> None:
        if kill_deadline == self.kill_deadline and self._worker_group is not None:
            self._on_timeout()
