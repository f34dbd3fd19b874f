"""Worker group: the ranks of one generation on this node, their processes and their progress board."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from wanma.checkpoint.in_memory.partner_ring import backed_up_ranks
from wanma.elastic.coordinator.user_notices import RESTARTED_EVENT
from wanma.elastic.detection.hang_detector import HangDetector
from wanma.elastic.failure import Failure, explain_sigkill, failure_from_exit_code
from wanma.elastic.launch_config import LaunchConfig, ScriptSettings
from wanma.elastic.protocol.local_messages import (
    EventReport,
    ForkCommand,
    ServeStoreCommand,
    SignalCommand,
    WorkerSpec,
)
from wanma.elastic.protocol.messages import (
    CompletionReport,
    Message,
    RankStatus,
    RankStatusRequest,
    RankWorkTime,
    Recovery,
    StartCommand,
    SuspendReport,
)
from wanma.elastic.recovery.in_memory_checkpoint_files import InMemoryCheckpointFiles
from wanma.elastic.supervisor.usage_recorder import UsageRecorder
from wanma.elastic.supervisor.worker_handle import WorkerHandle
from wanma.elastic.transport.event_loop import EventLoop
from wanma.elastic.workers.fork_server_handle import ForkServerHandle
from wanma.elastic.workers.progress_board import ProgressBoard, RankProgress
from wanma.elastic.workers.worker_output import OutputReader, read_last_output
from wanma.hardware.discovery.network_interfaces import INTERFACE_VARIABLES, NetworkRoute
from wanma.job.run.profile_request import ProfileRequest, read_profile_request
from wanma.job.run.resource_limits import count_oom_kills
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import Event, Restart

SIGHUP_TO_SIGKILL_SECONDS = 1.0
"""Time, in seconds, from SIGHUP to SIGKILL for ranks that have to end."""


class WorkerGroup:
    """Worker group of a generation on this node, forked by its constructor.

    Args:
        start: start command of the generation.
        launch: launch configuration.
        fork_server: fork server.
        loop: event loop.
        environment: added to that of the ranks.
        store_listener: socket at which rank 0, if it is here, serves the rendezvous store; closed here.
        memory_files: files of the ranks' in-memory checkpoints; None: there are none.
        failed_at: time at which the generation before failed, on the monotonic clock.
        on_message: gets the ranks' messages, and as one of the first rank each event of kind `usage`.
        on_event: gets the output of a script's ranks, and the notice of their restart.
    """

    def __init__(
        self,
        start: StartCommand,
        launch: LaunchConfig,
        fork_server: ForkServerHandle,
        loop: EventLoop,
        *,
        environment: Mapping[str, str],
        store_listener: socket.socket | None,
        memory_files: InMemoryCheckpointFiles | None,
        failed_at: float,
        on_message: Callable[[WorkerHandle, Message], None],
        on_event: Callable[[Event], object],
    ) -> None:
        self.start = start
        self._launch, self._loop = launch, loop
        self._script = launch.script or ScriptSettings()
        self._is_draining = False
        self.board = ProgressBoard.create(launch.ranks_per_node)
        # Ranks that begin after a request must not answer it again.
        self._pass_on(read_profile_request(RunDirectory(launch.run_directory)))
        self.hang_detector = HangDetector(self.board, launch, time.monotonic())
        self.workers: list[WorkerHandle] = []
        self.oom_kills_at_start = count_oom_kills()
        """Number of the kernel's out-of-memory kills before the start."""
        self._fork_server = fork_server
        self._output = self._open_output(on_event) if launch.is_script else None
        self._usage = self._record_usage(environment, on_message)
        if launch.script is not None and store_listener is not None:
            self._serve_script_store(store_listener)
            store_listener = None
        payload = _write_payload(launch.payload)
        recovery = start.recovery
        restore = recovery.checkpoint_id if recovery is not None else None
        restore_paths = {}
        if memory_files is not None:
            restore_paths = memory_files.get_restore_paths(restore) if restore is not None else {}
            own_ranks = range(start.first_rank, start.first_rank + launch.ranks_per_node)
            backups = [peer for rank in own_ranks for peer in backed_up_ranks(rank, start.local_world_sizes)]
            memory_files.allocate(launch.ranks_per_node, sorted(backups), restore)
        restart = _make_restart(recovery, failed_at) if recovery is not None else None
        for local_rank in range(launch.ranks_per_node):
            number = start.first_rank + local_rank
            spec = WorkerSpec(
                rank=number,
                local_rank=local_rank,
                world_size=start.world_size,
                local_world_size=launch.ranks_per_node,
                node_rank=start.node_rank,
                generation=start.generation,
                run_directory=str(launch.run_directory),
                entry=launch.entry,
                threads_per_rank=launch.threads_per_rank,
                store_host=start.store_host,
                store_port=start.store_port,
                environment=dict(environment),
                memory_file_paths=memory_files.get_write_paths(local_rank, restore)
                if memory_files is not None
                else (),
                restore_paths=restore_paths,
                restore_step=restore.step if restore is not None else None,
                backup_paths=memory_files.get_backup_paths(number, start.local_world_sizes, restore)
                if memory_files is not None
                else {},
                local_world_sizes=start.local_world_sizes,
                rank_addresses=start.rank_addresses,
                restart=restart,
                claims=(launch.claims or str(launch.run_directory)) if launch.nodes > 1 else None,
            )
            rank = WorkerHandle(spec, loop, on_message)
            self.workers.append(rank)
            descriptors = [rank.child_socket.fileno(), self.board.descriptor, payload, rank.stack_file]
            if spec.rank == 0 and store_listener is not None:
                descriptors.append(store_listener.fileno())
            fork_server.send(ForkCommand(spec), descriptors)
            rank.child_socket.close()
        os.close(payload)
        if store_listener is not None:
            store_listener.close()

    def _record_usage(
        self, environment: Mapping[str, str], on_message: Callable[[WorkerHandle, Message], None]
    ) -> UsageRecorder:
        run, node_rank = RunDirectory(self._launch.run_directory), self.start.node_rank
        interface = environment.get(INTERFACE_VARIABLES[0])
        return UsageRecorder(
            run,
            node_rank,
            interface,
            self._loop,
            self._living_pids,
            self._rank_values,
            lambda event: on_message(self.workers[0], EventReport(event)),
            look=lambda: read_profile_request(run),
            on_look=self._pass_on,
        )

    def _rank_values(self) -> dict[int, dict[str, Any]]:
        """Return the progress of each rank that has reported any, for the record of usage."""
        values: dict[int, dict[str, Any]] = {}
        for worker in self.workers:
            progress = self.board.read_progress(worker.spec.local_rank)
            work = self.board.read_work(worker.spec.local_rank)
            if not progress.report_count:
                continue
            own: dict[str, Any] = {"step": progress.step, "phase": progress.phase}
            own["has_finished"] = worker.is_finished
            values[worker.spec.rank] = own
            # As the hang detector judges: not before the first step, at the end, or in the user's own code.
            is_in_steps = progress.last_finished_step is not None and not progress.is_draining
            if is_in_steps and not progress.is_outside_session and not worker.has_reported_end:
                own["silent_seconds"] = max(time.monotonic() - progress.reported_at, 0.0)
            if work.steps:
                own |= asdict(work)
        return values

    def _living_pids(self) -> dict[int, int]:
        """Return the process number of each living rank."""
        return {
            worker.spec.rank: worker.pid
            for worker in self.workers
            if worker.pid is not None and not worker.has_exited
        }

    def _pass_on(self, request: ProfileRequest | None) -> None:
        if request is not None:
            self.board.request_profile(request.number)

    def _serve_script_store(self, listener: socket.socket) -> None:
        """Serve the store of a script on the node of rank 0, in a process that outlives the ranks."""
        if self.start.first_rank == 0 and self._script.store != "none":
            command = ServeStoreCommand(self.start.store_host, self.start.store_port, self._script.store)
            self._fork_server.send(command, [listener.fileno()])
        listener.close()

    def _open_output(self, on_event: Callable[[Event], object]) -> OutputReader:
        run, first = RunDirectory(self._launch.run_directory), self.start.first_rank
        ranks = range(first, first + self._launch.ranks_per_node)
        if (recovery := self.start.recovery) is not None:
            on_event({"kind": RESTARTED_EVENT, "failure": recovery.failure})
        return OutputReader([(rank, run.rank_log(rank)) for rank in ranks], self._loop, on_event)

    @property
    def is_outside_session(self) -> bool:
        """True if the ranks run a script, and none of them has a session open."""
        return self._launch.is_script and all(
            position.is_outside_session for position in self.read_progress()
        )

    @property
    def has_exited(self) -> bool:
        """True if no rank lives any more."""
        return all(rank.has_exited for rank in self.workers)

    @property
    def is_finished(self) -> bool:
        """True if all ranks did their work and have left, but for those that only serve others."""
        services = self._script.service_ranks
        return all(
            rank.is_finished and rank.has_exited for rank in self.workers if rank.spec.rank not in services
        )

    def make_exit_failure(self, worker: WorkerHandle, exit_code: int, hostname: str) -> Failure:
        """Return the failure of a rank whose process ended without a message."""
        spec, log = worker.spec, RunDirectory(self._launch.run_directory).rank_log(worker.spec.rank)
        return failure_from_exit_code(
            exit_code,
            spec.rank,
            spec.node_rank,
            hostname,
            str(log),
            explain_sigkill(self.oom_kills_at_start),
            task=self._script.get_task(spec.rank),
            last_output=read_last_output(log) if self._script.is_executed else "",
        )

    @property
    def last_finished_step(self) -> int | None:
        """Newest step that one of the ranks has finished; None: none has."""
        return max(
            (at.last_finished_step for at in self.read_progress() if at.last_finished_step is not None),
            default=None,
        )

    @property
    def progress_at_termination(self) -> tuple[int | None, int]:
        """`last_finished_step`, and finished steps at the ranks' position (0 before a report)."""
        return self.last_finished_step, max(
            (at.step for at in self.read_progress() if at.report_count), default=0
        )

    def read_progress(self) -> list[RankProgress]:
        """Return the last reports of the ranks."""
        return [self.board.read_progress(rank.spec.local_rank) for rank in self.workers]

    def read_work_times(self) -> tuple[RankWorkTime, ...]:
        """Return the work time of the ranks so far."""
        works = ((rank.spec.rank, self.board.read_work(rank.spec.local_rank)) for rank in self.workers)
        return tuple(
            RankWorkTime(rank, work.steps, work.peer_group, work.data_seconds, work.compute_seconds)
            for rank, work in works
        )

    @property
    def is_suspended(self) -> bool:
        """True if the ranks are suspended: they have left with in-memory checkpoints."""
        return self.is_finished and all(rank.is_suspending for rank in self.workers)

    def make_end_report(self) -> SuspendReport | CompletionReport:
        """Return the report to the coordinator that this node's own work `is_finished`."""
        return SuspendReport() if self.is_suspended else CompletionReport(is_serving=not self.has_exited)

    def get_worker(self, rank: int) -> WorkerHandle:
        return self.workers[rank - self.start.first_rank]

    def request_drain(self, kill_deadline: float | None, by_interrupt: bool) -> None:
        """Request an orderly stop; a script without a session gets the signal that a terminal would send.

        Args:
            kill_deadline: deadline for the ranks, on the monotonic clock; None: no kill was announced.
            by_interrupt: True if a Ctrl-C is the cause.
        """
        self.board.request_drain(kill_deadline)
        if not self._launch.is_script or self._is_draining:
            return
        self._is_draining = True
        for rank in self.workers:
            if self._is_outside_session(rank):
                number = signal.SIGINT if by_interrupt else signal.SIGTERM
                self._fork_server.send(SignalCommand(rank.spec.rank, number, to_process_group=False))
        self._loop.call_later(self._launch.grace_seconds, self._kill_scripts)

    def _kill_scripts(self) -> None:
        """Kill scripts that did not leave when they were asked to."""
        for rank in self.workers:
            if self._is_outside_session(rank):
                self._fork_server.send(SignalCommand(rank.spec.rank, signal.SIGKILL, to_process_group=True))

    def _is_outside_session(self, worker: WorkerHandle) -> bool:
        return not worker.has_exited and self.board.read_progress(worker.spec.local_rank).is_outside_session

    def record_exit(self, worker: WorkerHandle, exit_code: int) -> None:
        """Note the end of a rank's process; a script may have done its work without a report.

        Its own `os._exit(0)` counts as done, and so does any end after it was asked to stop.
        """
        was_stopped = self._is_draining and self._is_outside_session(worker)
        if self._launch.is_script and not worker.has_reported_end and (exit_code == 0 or was_stopped):
            worker.is_finished = worker.has_reported_end = True
        if self._output is not None:
            self._output.flush()
        worker.exit_code = exit_code

    def kill(self, signal_number: signal.Signals) -> None:
        """Send a signal to the living ranks and all processes that they started."""
        for rank in self.workers:
            if not rank.has_exited:
                self._fork_server.send(SignalCommand(rank.spec.rank, signal_number, to_process_group=True))

    def end(self, is_completed: bool, notify: Callable[[str], object]) -> None:
        """End the ranks that still run.

        Args:
            is_completed: True if the run has finished: what still runs only served others, and may take the
                grace period to leave.
            notify: shows a text to the user.
        """
        services = [
            self._script.get_task(worker.spec.rank) for worker in self.workers if not worker.has_exited
        ]
        if is_completed and services:
            notify(f"all other ranks have finished: ending {', '.join(services)}")
            self.board.request_drain(None)  # for scripts that have not begun, and ignore the signal
            self.kill(signal.SIGTERM)
            self._loop.call_later(self._launch.grace_seconds, lambda: self.kill(signal.SIGKILL))
            return
        self.kill(signal.SIGHUP)  # ranks ignore SIGTERM
        self._loop.call_later(SIGHUP_TO_SIGKILL_SECONDS, lambda: self.kill(signal.SIGKILL))

    def request_rank_statuses(self) -> None:
        """Ask the living ranks for their status."""
        for rank in self.workers:
            if not rank.has_exited:
                rank.connection.send(RankStatusRequest())
                self._fork_server.send(SignalCommand(rank.spec.rank, signal.SIGUSR1, to_process_group=False))

    def read_rank_statuses(self, hostname: str) -> tuple[RankStatus, ...]:
        """Return the status of the living ranks, some time after `request_rank_statuses`."""
        now = time.monotonic()
        return tuple(
            rank.read_status(self.board, hostname, now) for rank in self.workers if not rank.has_exited
        )

    def close(self) -> None:
        if self._output is not None:
            self._output.close()
        if self._usage is not None:
            self._usage.close()
        for rank in self.workers:
            rank.close()
        self.board.close()


def make_network_environment(
    launch: LaunchConfig, route: NetworkRoute, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return additions to the workers' environment, which keep torch's sockets on the nodes' interface.

    The user's own variables count, unless the job names an interface.

    Args:
        launch: launch configuration.
        route: interface and address by which this node and the others reach each other.
        inherited: environment that the workers have besides.
    """
    added = {**launch.worker_environment, "OMP_NUM_THREADS": str(launch.threads_per_rank)}
    if route.interface is not None:
        # NCCL takes a name as a prefix (eth1, and eth10 too) unless told otherwise.
        for variable, value in zip(
            INTERFACE_VARIABLES, (route.interface, f"={route.interface}"), strict=True
        ):
            if launch.network_interface is not None or variable not in inherited:
                added.setdefault(variable, value)
    return added


def _write_payload(content: bytes) -> int:
    """Return the descriptor of a file in memory with the argument of the entry function."""
    payload = os.memfd_create("wanma-payload", os.MFD_CLOEXEC)
    with open(payload, "wb", closefd=False) as file:
        file.write(content)
    return payload


def _make_restart(recovery: Recovery, failed_at: float) -> Restart:
    """Return what workers learn of the failure before their start."""
    return Restart(
        recovery.failure,
        failed_at,
        recovery.last_finished_step,
        recovery.attempt,
        recovery.retried_steps,
        recovery.resize,
        recovery.retained_step,
    )
