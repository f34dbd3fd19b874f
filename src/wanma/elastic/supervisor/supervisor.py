"""Supervisor of one node of a run: starts, watches and ends its ranks, and passes on their messages.

`run_supervisor` is the entry point. The supervisor never imports torch and runs no thread: it waits in one
loop for its fork server, its workers, its coordinator and the user's signals. The coordinator decides how to
react to an event, for one node as for many; here its decision is carried out.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
from dataclasses import asdict

from wanma.elastic.coordinator import user_notices as notices
from wanma.elastic.coordinator.failover import NODE_LOST_HINT
from wanma.elastic.coordinator.node_ranks import make_join_request
from wanma.elastic.failure import Failure
from wanma.elastic.launch_config import LaunchConfig, OnEvent, RunOutcome, get_hostname
from wanma.elastic.membership.coordinator_link import open_coordinator_link
from wanma.elastic.protocol.local_messages import (
    CollectiveStateReport,
    EventReport,
    PreloadReport,
    WorkerExitReport,
    WorkerStartReport,
)
from wanma.elastic.protocol.messages import (
    AbortCommand,
    AbortRequest,
    CompletionNotice,
    CompletionReport,
    DrainCommand,
    DrainRequest,
    FailureReport,
    FlushCommand,
    JoinRequest,
    Message,
    NodePreloadedReport,
    Notice,
    ProgressRequest,
    RankStatusRequest,
    ReleaseCommand,
    StartCommand,
    StragglerReport,
    SuspendCommand,
    SuspendReport,
    TerminateCommand,
    TerminationReport,
)
from wanma.elastic.recovery.in_memory_checkpoint_files import InMemoryCheckpointFiles
from wanma.elastic.supervisor.drain import DrainController
from wanma.elastic.supervisor.failure_clock import FailureClock
from wanma.elastic.supervisor.stop_signals import SIGINT_EXIT_CODE, STOP_SIGNALS, ReceivedSignals, StopRequest
from wanma.elastic.supervisor.worker_group import WorkerGroup, make_network_environment
from wanma.elastic.supervisor.worker_handle import WorkerHandle
from wanma.elastic.supervisor.worker_monitor import WorkerMonitor, make_progress_report
from wanma.elastic.transport.endpoint import listen_on_free_port
from wanma.elastic.transport.event_loop import EventLoop
from wanma.elastic.workers.fork_server_handle import ForkServerHandle
from wanma.elastic.workers.linux_processes import process_state
from wanma.hardware.discovery.network_interfaces import NetworkRoute, find_route_from, format_route
from wanma.job.plan.plan import Plan
from wanma.job.run.run_directory import RunDirectory, write_atomically


def run_supervisor(
    launch: LaunchConfig, on_event: OnEvent, fork_server: ForkServerHandle | None = None
) -> RunOutcome:
    """Run this node's ranks to their end; none of their processes survives the call.

    Args:
        launch: launch configuration.
        on_event: gets the events of rank 0 (on its node) and the supervisor's own: of kind `message`; on
            several nodes `joined` when all have joined; on the node of rank 0, `straggler` and `hang`. Text
            that it returns requests an orderly end.
        fork_server: fork server started earlier by `ForkServerHandle.start`; it is used up.

    Raises:
        WanmaError: the nodes could not meet, or this is no place to run; nothing was started.
    """
    fork_server = fork_server or ForkServerHandle.start(launch.preload_modules, launch.worker_environment)
    loop = EventLoop()
    supervisor = Supervisor(launch, on_event, fork_server, loop)
    try:
        return supervisor.run()
    finally:
        supervisor.close()
        loop.close()


class Supervisor:
    """Supervisor of one node, driven by the event loop."""

    def __init__(
        self, launch: LaunchConfig, on_event: OnEvent, fork_server: ForkServerHandle, loop: EventLoop
    ) -> None:
        self._launch, self._on_event, self._fork_server, self._loop = launch, on_event, fork_server, loop
        self._run = RunDirectory(launch.run_directory)
        self._hostname = get_hostname()
        self._is_preloaded = False
        self._start: StartCommand | None = None
        self._pending_start: StartCommand | None = None
        """Start command that waits for the fork server."""
        self._has_pending_suspend = False
        """True if the ranks of `_pending_start` are to suspend after their first step."""
        self._ending: AbortCommand | CompletionNotice | ReleaseCommand | None = None
        self._signals = ReceivedSignals()
        """Signals that have come, and the time of each one's first."""
        self._drain_exit_code, self._drain_reason = 0, ""
        """Exit code of a run that was asked to stop (0: it was not), and the origin here, if no signal."""
        self._has_warned_fork_hazard = False
        self._worker_group: WorkerGroup | None = None
        """Newest worker group, also while none of it lives."""
        self._worker_monitor: WorkerMonitor | None = None
        self._memory_files = InMemoryCheckpointFiles(launch.ranks_per_node) if launch.max_restarts else None
        self._drain = DrainController(
            launch,
            loop,
            self._memory_files,
            lambda message: self._link.send(message),
            lambda text: self._notify(text, level="warning"),
            self._handle_drain_timeout,
        )
        self._is_terminating = False
        """True if a command has come to end the ranks, and some are not gone."""
        self._has_left = False
        """True if this node leaves a run that continues."""
        self._failure_clock = FailureClock()
        self._store_listener: socket.socket | None = None
        self._route = NetworkRoute(None, "", "")

    def run(self) -> RunOutcome:
        self._signals.listen(self._loop, self._handle_signal)
        self._loop.watch(self._fork_server.control, self._handle_fork_server_message, selectors.EVENT_READ)
        self._link = open_coordinator_link(
            self._launch,
            os.environ,
            self._loop,
            self._make_join_request,
            self._handle_command,
            self._coordinator_lost,
        )
        if self._launch.nodes > 1:
            min_nodes = f"{self._launch.min_nodes} to " if self._launch.replanner is not None else ""
            self._notify(f"rendezvous of {min_nodes}{self._launch.nodes} nodes at {self._launch.rendezvous}")
        try:
            self._loop.run_until(
                lambda: self._ending is not None and (not self._worker_group or self._worker_group.has_exited)
            )
        finally:
            self._loop.unwatch(self._fork_server.control)
            self._link.close(linger=self._ending is not None)
        assert self._ending is not None
        self._notify_end(self._ending)
        failure = self._ending.failure if isinstance(self._ending, AbortCommand) else None
        return RunOutcome(self._ending.exit_code, failure, self._has_left)

    def close(self) -> None:
        self._drain.close()
        self._fork_server.close()
        if self._worker_group is not None:
            self._worker_group.close()
        if self._memory_files is not None:
            self._memory_files.close()
        if self._store_listener is not None:
            self._store_listener.close()

    # Commands of the coordinator -----------------------------------------------------------------

    def _make_join_request(self, address: str) -> JoinRequest:
        """Return this node's request to join; `address` is the one that reaches the coordinator."""
        self._route = find_route_from(address, self._launch.network_interface)
        return make_join_request(
            self._launch, self._hostname, self._route.address, self._bind_store_port(), self._is_preloaded
        )

    def _bind_store_port(self) -> int:
        """Bind the port of the next generation's store, and return it; 0: it needs none.

        It is bound before the node rank is known, so that the port can be sent with the first message.
        """
        if self._launch.nodes * self._launch.ranks_per_node == 1 and not self._launch.is_script:
            return 0
        if self._store_listener is not None:
            self._store_listener.close()
        self._store_listener = listen_on_free_port(self._route.address)
        return int(self._store_listener.getsockname()[1])

    def _handle_command(self, message: Message) -> None:
        match message:
            case _ if self._ending is not None:
                pass
            case StartCommand():
                self._handle_start_command(message)
            case DrainCommand(exit_code, seconds, reason):
                if self._drain.begin(message) or not self._drain_exit_code:
                    is_local, has_steps = bool(self._signals) or reason == self._drain_reason, self._has_steps
                    text = notices.drain_text(exit_code, is_local, reason, seconds, has_steps=has_steps)
                    self._notify(text)
                self._drain_exit_code = exit_code
                if self._worker_group is not None:
                    self._worker_group.request_drain(self._drain.kill_deadline, exit_code == SIGINT_EXIT_CODE)
            case FlushCommand() if self._start is not None:
                self._drain.start_flush(message, self._start.generation)
            case RankStatusRequest() if self._worker_monitor is not None:
                self._failure_clock.record(self._worker_group)
                self._worker_monitor.report_rank_statuses(self._hostname)
            case ProgressRequest():
                is_pending = self._pending_start is not None
                self._link.send(make_progress_report(None if is_pending else self._worker_group))
            case SuspendCommand() if self._pending_start is not None:
                self._has_pending_suspend = True
            case SuspendCommand() if self._worker_group is not None:
                self._worker_group.board.request_suspend()
            case TerminateCommand(report):
                self._terminate(report)
            case StragglerReport():
                self._notify_straggler(message)
            case Notice(text):
                self._notify(text, level="warning")
            case AbortCommand() | CompletionNotice() | ReleaseCommand():
                self._has_left = isinstance(message, ReleaseCommand)
                self._end(message)

    def _handle_start_command(self, message: StartCommand) -> None:
        """Begin a generation: note its plan and its cause, and start its workers once they can be forked."""
        first = self._start is None
        if first:
            self._failure_clock.synchronize(message.failure_unix_seconds)
        self._start, self._pending_start, self._has_pending_suspend = message, message, False
        self._apply_plan(message)
        if (recovery := message.recovery) is not None:
            silent = self._launch.is_script and recovery.last_finished_step == 0
            if message.first_rank > 0 or silent:
                self._notify(notices.restart_text(recovery), level="warning")
        if first and self._launch.nodes > 1:
            route = format_route(self._route, os.environ)
            text = notices.node_joined_text(self._launch, message, self._link.endpoint, route)
            self._on_event({"kind": "joined", "text": text, "shows_the_run": message.first_rank == 0})
        self._start_workers_when_ready()

    def _apply_plan(self, start: StartCommand) -> None:
        """Take the coordinator's plan for this node's ranks, if it has one."""
        if start.plan is None:
            return
        assert self._launch.replanner is not None
        plan, nodes = Plan.from_json(start.plan), len(start.local_world_sizes)
        self._launch = self._launch.replanner.make_launch_config(self._launch, plan, nodes)
        if start.first_rank == 0:
            self._on_event({"kind": "planned", "plan": start.plan, "forecast": start.forecast})

    def _notify_straggler(self, report: StragglerReport) -> None:
        text, level = notices.straggler_text(report), "warning" if report.is_slow else "info"
        self._notify(text, level)
        if self._start is not None and self._start.first_rank == 0:
            self._on_event({"kind": "straggler", **asdict(report), "level": level, "text": text})

    def _coordinator_lost(self, reason: str) -> None:
        if self._ending is None:
            self._end(AbortCommand(1, Failure(reason, hint=NODE_LOST_HINT)))

    def _end(self, ending: AbortCommand | CompletionNotice | ReleaseCommand) -> None:
        """End the ranks; from here on only their deaths matter."""
        self._ending = ending
        self._drain.close()
        if isinstance(ending, AbortCommand):
            self._write_report(ending.hang_report)
        if self._worker_group is not None:
            self._worker_group.end(isinstance(ending, CompletionNotice), self._notify)

    def _notify_end(self, ending: AbortCommand | CompletionNotice | ReleaseCommand) -> None:
        """Tell the user the end, unless rank 0's record or the failure does."""
        if isinstance(ending, AbortCommand) and ending.flush_summary:
            self._notify(ending.flush_summary, level="warning")
        if self._start is not None and self._launch.nodes > 1:
            start, nodes = self._start, len(self._start.local_world_sizes) or self._launch.nodes
            if text := notices.run_end_text(ending, nodes, start.node_rank, start.first_rank == 0):
                self._notify(text)

    def _write_report(self, report: str) -> None:
        if not report:
            return
        if self._start is not None and self._start.first_rank == 0:
            self._on_event({"kind": "hang", "level": "error", "text": report.partition("\n\n")[0]})
        try:
            write_atomically(self._run.path / "logs" / "hang-report.txt", report)
        except OSError as error:
            self._notify(f"cannot write the hang report: {error}", level="warning")

    # Termination before a restart ----------------------------------------------------------------

    def _terminate(self, report: str) -> None:
        """End the ranks at once: each waits for one that failed, and their in-memory checkpoints remain."""
        self._failure_clock.record(self._worker_group)
        self._is_terminating = True
        self._pending_start = None
        if self._worker_group is not None:
            self._worker_group.kill(signal.SIGKILL)
        self._write_report(report)
        self._report_termination()

    def _report_termination(self) -> None:
        if self._is_terminating and (self._worker_group is None or self._worker_group.has_exited):
            self._is_terminating = False
            reached, last_step = (
                self._worker_group.progress_at_termination if self._worker_group is not None else (None, 0)
            )
            shards = self._memory_files.list_complete_shards() if self._memory_files is not None else ()
            self._link.send(
                TerminationReport(
                    self._bind_store_port(), reached, shards, self._failure_clock.unix_seconds, last_step
                )
            )

    # Signals -------------------------------------------------------------------------------------

    def _handle_signal(self, number: int) -> None:
        """Request a drain at the first signal; leave at once at the second, or at Ctrl-C after SIGTERM.

        All but Ctrl-C concern this node alone, if the run may continue without it.
        """
        if self._ending is not None or self._signals.is_repeat(number):
            return
        is_second = self._signals.add(number)
        exit_code = SIGINT_EXIT_CODE if number == signal.SIGINT else self._launch.requeue_exit_code
        node_only = number != signal.SIGINT and self._launch.replanner is not None
        if not is_second and self._worker_group is not None:
            seconds = self._launch.grace_seconds if number == signal.SIGTERM else None
            if node_only and seconds is not None:
                self._drain.begin_departure(seconds)
            reason = STOP_SIGNALS[signal.Signals(number)]
            self._link.send(DrainRequest(exit_code, seconds, reason, node_only))
        else:
            if self._worker_group is None:
                self._notify(str(StopRequest(number)), level="warning")
            self._abort(exit_code, node_only)

    def _abort(self, exit_code: int, node_only: bool) -> None:
        self._has_left = node_only and not self._drain_exit_code
        self._link.send(AbortRequest(exit_code, node_only))
        self._end(AbortCommand(exit_code))

    def _handle_drain_timeout(self) -> None:
        """Leave with the exit code of a stop, as the kill is near."""
        if self._ending is not None:
            return
        is_departure = not self._drain_exit_code and self._launch.replanner is not None
        self._notify(notices.grace_end_text(is_departure, self._has_steps), level="warning")
        self._abort(self._launch.requeue_exit_code, self._launch.replanner is not None)

    @property
    def _has_steps(self) -> bool:
        """False for a script outside a session: it cannot be asked to stop after a step."""
        group = self._worker_group
        return not self._launch.is_script or (group is not None and not group.is_outside_session)

    # The fork server and its workers -------------------------------------------------------------

    def _handle_fork_server_message(self, _events: int) -> None:
        try:
            while (message := self._fork_server.receive()) is not None:
                match message:
                    case PreloadReport(notes):
                        self._is_preloaded = True
                        if self._launch.replanner is not None:
                            self._link.send(NodePreloadedReport())
                        for note in notes:
                            self._notify(note, level="warning")
                        self._start_workers_when_ready()
                    case WorkerStartReport(rank, pid, obstacle):
                        assert self._worker_group is not None
                        self._worker_group.get_worker(rank).pid = pid
                        if obstacle and not self._has_warned_fork_hazard:
                            self._has_warned_fork_hazard = True
                            self._notify(
                                f"ranks start by exec instead of fork, which is slower: {obstacle}",
                                level="warning",
                            )
                    case WorkerExitReport(rank, code):
                        assert self._worker_group is not None
                        worker = self._worker_group.get_worker(rank)
                        self._handle_worker_exit(self._worker_group, worker, code)
        except EOFError:
            self._loop.unwatch(self._fork_server.control)
            self._handle_fork_server_exit()

    def _handle_fork_server_exit(self) -> None:
        """Restart the fork server, or end; its workers are killed by the kernel, their children here."""
        self._is_preloaded = False
        if self._ending is None:
            end, hint = self._fork_server.describe_exit()
            number = self._start.node_rank if self._start is not None else None
            node_text = self._hostname if number is None else f"node {number} ({self._hostname})"
            failure = Failure(
                f"the fork server of {node_text} {end}", node_rank=number, hostname=self._hostname, hint=hint
            )
            self._report_failure(failure)
            if self._launch.max_restarts and self._worker_group is not None:
                self._fork_server.close()
                self._fork_server = ForkServerHandle.start(
                    self._launch.preload_modules, self._launch.worker_environment
                )
                self._loop.watch(
                    self._fork_server.control, self._handle_fork_server_message, selectors.EVENT_READ
                )
            else:
                self._end(AbortCommand(failure.exit_code, failure))
        if self._worker_group is not None:
            for rank in self._worker_group.workers:
                if not rank.has_exited and rank.pid is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(rank.pid, signal.SIGKILL)
            self._await_worker_exits(self._worker_group)

    def _await_worker_exits(self, worker_group: WorkerGroup) -> None:
        for rank in worker_group.workers:
            if not rank.has_exited and (rank.pid is None or process_state(rank.pid) in ("gone", "dead")):
                rank.exit_code = -signal.SIGKILL
        if worker_group.has_exited:
            self._report_termination()
        else:
            self._loop.call_later(0.01, lambda: self._await_worker_exits(worker_group))

    def _start_workers_when_ready(self) -> None:
        if not self._is_preloaded or self._pending_start is None or self._ending is not None:
            return
        if self._worker_group is not None:
            self._worker_group.close()
        team = self._worker_group = WorkerGroup(
            self._pending_start,
            self._launch,
            self._fork_server,
            self._loop,
            environment=make_network_environment(self._launch, self._route, os.environ),
            store_listener=self._store_listener,
            memory_files=self._memory_files,
            failed_at=self._failure_clock.monotonic_seconds,
            on_message=self._handle_worker_message,
            on_event=self._on_event,
        )
        self._pending_start = self._store_listener = None
        if self._drain_exit_code:
            team.request_drain(self._drain.kill_deadline, self._drain_exit_code == SIGINT_EXIT_CODE)
        if self._has_pending_suspend:
            team.board.request_suspend()
        self._drain.attach_workers(team)
        if team.is_finished:  # its ranks only serve those of other nodes
            self._link.send(team.make_end_report())
        self._worker_monitor = WorkerMonitor(
            team,
            self._loop,
            self._link.send,
            is_current=lambda: (
                self._ending is None and team is self._worker_group and not self._is_terminating
            ),
            before_check=lambda: self._drain.update_step_time(team),
            nodes=self._launch.nodes,
        )

    def _handle_worker_message(self, worker: WorkerHandle, message: Message) -> None:
        match message:
            case EventReport(event):
                if reason := self._on_event(event):
                    self._drain_reason = reason
                    self._link.send(DrainRequest(SIGINT_EXIT_CODE, None, reason))
            case FailureReport(failure):
                worker.has_reported_end = True
                self._report_failure(failure)
            case CompletionReport():
                worker.is_finished = worker.has_reported_end = True
            case SuspendReport():
                worker.is_suspending = True
                # Lost time counts from here, as after a failure.
                self._failure_clock.record(self._worker_group)
            case CollectiveStateReport():
                worker.collective_state = message

    def _handle_worker_exit(self, worker_group: WorkerGroup, worker: WorkerHandle, code: int) -> None:
        worker.connection.read()  # its last messages may not have been read yet
        worker_group.record_exit(worker, code)
        worker.connection.close()
        if self._is_terminating:
            self._report_termination()
            return
        if self._ending is not None:
            return
        if not worker.has_reported_end:
            self._report_failure(worker_group.make_exit_failure(worker, code, self._hostname))
        if worker_group.is_finished:
            self._link.send(worker_group.make_end_report())

    def _report_failure(self, failure: Failure) -> None:
        self._failure_clock.record(self._worker_group)
        self._link.send(FailureReport(failure))

    def _notify(self, text: str, level: str = "info") -> None:
        self._on_event({"kind": "message", "level": level, "text": text})
