"""Supervisor of one node of a run: starts, watches and ends its ranks, and passes on their messages.

`run_node` is the entry point. The supervisor never imports torch and runs no thread: it waits in one loop for
its fork server, its workers, its coordinator and the user's signals. The coordinator decides how to react to
an event, for one node as for many; here its decision is carried out.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from dataclasses import asdict

from wanma.elastic.coordinator import user_notices as notices
from wanma.elastic.coordinator.failover import LOST_HINT
from wanma.elastic.coordinator.node_ranks import offer
from wanma.elastic.diagnosis.straggler_detector import WINDOW_SECONDS
from wanma.elastic.failure import Failure, failure_of_exit, killed_hint
from wanma.elastic.launch_config import Launch, OnEvent, Outcome, host_name
from wanma.elastic.membership.coordinator_link import open_link
from wanma.elastic.protocol.local_messages import Exited, Happened, Ready, Started, Whereabouts
from wanma.elastic.protocol.messages import (
    Abort,
    Failed,
    Finished,
    Halt,
    Halted,
    Hung,
    Inspect,
    Join,
    Leave,
    Locate,
    Message,
    Moving,
    Over,
    Pause,
    Paused,
    Reached,
    Rescue,
    Slow,
    Standings,
    Start,
    Stop,
    StopRequest,
    Waiting,
    Warm,
    Works,
)
from wanma.elastic.recovery.in_memory_checkpoint_files import ImageFiles
from wanma.elastic.supervisor.drain import Departure
from wanma.elastic.supervisor.failure_clock import FailureTime
from wanma.elastic.supervisor.worker_group import Team, team_environment
from wanma.elastic.supervisor.worker_handle import LocalRank
from wanma.elastic.transport.endpoint import listen_anywhere
from wanma.elastic.transport.event_loop import Loop
from wanma.elastic.workers.fork_server_handle import Node
from wanma.elastic.workers.linux_processes import process_state
from wanma.hardware.discovery.network_interfaces import Way, way_from, way_text
from wanma.job.plan.plan import Plan
from wanma.job.run.run_directory import RunDirectory, write_atomically

KILL_SECONDS = 1.0
"""Time, in seconds, from SIGHUP to SIGKILL for ranks that have to end."""
ANSWER_SECONDS = 2.0
"""Time, in seconds, that ranks may take to report their status."""
REPEAT_SECONDS = 1.0
"""Time, in seconds, in which another SIGTERM is the same one: sent to the job, its shell and each process."""
INTERRUPTED = 130
"""Exit code of a run that Ctrl-C has stopped."""
SIGNALS = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "SIGTERM",
    signal.SIGUSR1: "SIGUSR1",
    signal.SIGHUP: "SIGHUP",
}
"""Signals that ask the run to stop; SIGKILL follows a SIGTERM, and SIGTERM, some day, a SIGUSR1."""


def run_node(launch: Launch, on_event: OnEvent, node: Node | None = None) -> Outcome:
    """Run this node's ranks to their end; none of their processes survives the call.

    Args:
        launch: launch configuration.
        on_event: gets the events of rank 0 (on its node) and the supervisor's own: of kind `message`; on
            several nodes `joined` when all have joined; on the node of rank 0, `straggler`. Text that it
            returns requests an orderly end.
        node: fork server started earlier by `Node.start`; it is used up.

    Raises:
        WanmaError: the nodes could not meet, or this is no place to run; nothing was started.
    """
    node = node or Node.start(launch.preload, launch.environment)
    loop = Loop()
    supervisor = Supervisor(launch, on_event, node, loop)
    try:
        return supervisor.run()
    finally:
        supervisor.close()
        loop.close()


class Supervisor:
    """Supervisor of one node, driven by the event loop."""

    def __init__(self, launch: Launch, on_event: OnEvent, node: Node, loop: Loop) -> None:
        self._launch, self._on_event, self._node, self._loop = launch, on_event, node, loop
        self._run = RunDirectory(launch.run_directory)
        self._host = host_name()
        self._ready = False
        self._start: Start | None = None
        self._due: Start | None = None
        """Start command that waits for the fork server."""
        self._ending: Abort | Over | None = None
        self._signals: dict[int, float] = {}
        """Signals that have come, and the time of each one's first."""
        self._stop, self._wish = 0, ""
        """Exit code of a run that was asked to stop (0: it was not), and the origin here, if no signal."""
        self._told_obstacle = False
        self._team: Team | None = None
        """Newest worker group, also while none of it lives."""
        self._images = ImageFiles(launch.ranks_per_node) if launch.retries else None
        self._departure = Departure(
            launch,
            loop,
            self._images,
            lambda word: self._link.send(word),
            lambda text: self._message(text, level="warning"),
            self._out_of_time,
        )
        self._halting = False
        """True if a command has come to end the ranks, and some are not gone."""
        self._failed = FailureTime()
        self._store_listener: socket.socket | None = None
        self._way = Way(None, "", "")

    def run(self) -> Outcome:
        self._loop.catch(SIGNALS, self._signalled)
        self._loop.watch(self._node.control, self._fork_server_said, selectors.EVENT_READ)
        self._link = open_link(
            self._launch, os.environ, self._loop, self._join, self._told, self._coordinator_lost
        )
        if self._launch.nodes > 1:
            few = f"{self._launch.min_nodes} to " if self._launch.replanner is not None else ""
            self._message(f"the {few}{self._launch.nodes} nodes of the run meet at {self._launch.rendezvous}")
        try:
            self._loop.run_until(lambda: self._ending is not None and (not self._team or self._team.gone))
        finally:
            self._loop.forget(self._node.control)
            self._link.close(linger=self._ending is not None)
        assert self._ending is not None
        self._tell_end(self._ending)
        failure = self._ending.failure if isinstance(self._ending, Abort) else None
        return Outcome(self._ending.exit_code, failure)

    def close(self) -> None:
        self._departure.close()
        self._node.close()
        if self._team is not None:
            self._team.close()
        if self._images is not None:
            self._images.close()
        if self._store_listener is not None:
            self._store_listener.close()

    # Commands of the coordinator -----------------------------------------------------------------

    def _join(self, address: str) -> Join:
        """Return this node's request to join; `address` is the one that reaches the coordinator."""
        self._way = way_from(address, self._launch.interface)
        return offer(self._launch, self._host, self._way.address, self._listen(), self._ready)

    def _listen(self) -> int:
        """Bind the port of the next generation's store, and return it; 0: it needs none.

        It is bound before the node rank is known, so that the port can be sent with the first message.
        """
        if self._launch.nodes * self._launch.ranks_per_node == 1 and not self._launch.is_script:
            return 0
        if self._store_listener is not None:
            self._store_listener.close()
        self._store_listener = listen_anywhere(self._way.address)
        return int(self._store_listener.getsockname()[1])

    def _told(self, message: Message) -> None:
        match message:
            case _ if self._ending is not None:
                pass
            case Start():
                self._take_start(message)
            case Stop(exit_code, seconds, what):
                if self._departure.begin(message) or not self._stop:
                    in_steps = self._team is None or not self._team.is_outside
                    here = bool(self._signals) or what == self._wish
                    self._message(notices.stopping_text(exit_code, here, what, seconds, in_steps=in_steps))
                self._stop = exit_code
                if self._team is not None:
                    self._team.request_stop(self._departure.until, exit_code == INTERRUPTED)
            case Rescue() if self._start is not None:
                self._departure.rescue(message, self._start.generation)
            case Inspect() if self._team is not None:
                self._failed.note(self._team)
                self._inspect(self._team)
            case Locate():
                self._locate()
            case Pause() if self._team is not None:
                self._team.board.request_pause()
            case Halt(report):
                self._halt(report)
            case Slow():
                self._tell_slow(message)
            case Waiting(text):
                self._message(text, level="warning")
            case Abort() | Over():
                self._end(message)

    def _take_start(self, message: Start) -> None:
        """Begin a generation: note its plan and its cause, and start its workers once they can be forked."""
        first = self._start is None
        if first:
            self._failed.hear(message.failed_at)
        self._start = self._due = message
        self._take_plan(message)
        if (recovery := message.recovery) is not None:
            silent = self._launch.is_script and recovery.reached_step == 0
            if message.first_rank > 0 or silent:
                self._message(notices.started_again_text(recovery), level="warning")
        if first and self._launch.nodes > 1:
            way = way_text(self._way, os.environ)
            text = notices.joined_text(self._launch, message, self._link.place, way)
            self._on_event({"kind": "joined", "text": text, "shows_the_run": message.first_rank == 0})
        self._fork_when_ready()

    def _take_plan(self, start: Start) -> None:
        """Take the coordinator's plan for this node's ranks, if it has one."""
        if start.plan is None:
            return
        assert self._launch.replanner is not None
        plan, nodes = Plan.from_json(start.plan), len(start.ranks_by_node)
        self._launch = self._launch.replanner.launch(self._launch, plan, nodes)
        if start.first_rank == 0:
            self._on_event({"kind": "planned", "plan": start.plan, "forecast": start.forecast})

    def _locate(self) -> None:
        team = self._team
        pace = team.watch.pace() if team is not None else None
        step_seconds, start_seconds = pace or (None, None)
        self._link.send(Reached(team.reached_step if team is not None else None, step_seconds, start_seconds))

    def _tell_slow(self, slow: Slow) -> None:
        text, level = notices.slow_text(slow), "warning" if slow.is_slow else "info"
        self._message(text, level)
        if self._start is not None and self._start.first_rank == 0:
            self._on_event({"kind": "straggler", **asdict(slow), "level": level, "text": text})

    def _coordinator_lost(self, reason: str) -> None:
        if self._ending is None:
            self._end(Abort(1, Failure(reason, hint=LOST_HINT)))

    def _end(self, ending: Abort | Over) -> None:
        """End the ranks; from here on only their deaths matter."""
        self._ending = ending
        self._departure.close()
        if isinstance(ending, Abort):
            self._write_report(ending.report)
        self._kill(signal.SIGHUP)  # ranks ignore SIGTERM
        self._loop.call_later(KILL_SECONDS, lambda: self._kill(signal.SIGKILL))

    def _tell_end(self, ending: Abort | Over) -> None:
        """Tell the user the end, unless rank 0's record or the failure does."""
        if isinstance(ending, Abort) and ending.note:
            self._message(ending.note, level="warning")
        if self._start is not None and self._launch.nodes > 1:
            start, nodes = self._start, len(self._start.ranks_by_node) or self._launch.nodes
            if text := notices.ended_text(ending, nodes, start.node_rank, start.first_rank == 0):
                self._message(text)

    def _kill(self, number: signal.Signals) -> None:
        if self._team is not None:
            self._team.kill(number)

    def _write_report(self, report: str) -> None:
        if not report:
            return
        try:
            write_atomically(self._run.path / "logs" / "hang-report.txt", report)
        except OSError as error:
            self._message(f"the hang report cannot be written: {error}", level="warning")

    # Termination before a restart ----------------------------------------------------------------

    def _halt(self, report: str) -> None:
        """End the ranks at once: each waits for one that failed, and their in-memory checkpoints remain."""
        self._failed.note(self._team)
        self._halting = True
        self._due = None
        self._kill(signal.SIGKILL)
        self._write_report(report)
        self._when_gone()

    def _when_gone(self) -> None:
        if self._halting and (self._team is None or self._team.gone):
            self._halting = False
            reached, stood_at = self._team.came_to if self._team is not None else (None, 0)
            images = self._images.held() if self._images is not None else ()
            self._link.send(Halted(self._listen(), reached, images, self._failed.unix, stood_at))

    # Signals -------------------------------------------------------------------------------------

    def _signalled(self, number: int) -> None:
        """Request a drain at the first signal; leave at once at the second, or at Ctrl-C after SIGTERM."""
        again = number in self._signals or (number == signal.SIGINT and signal.SIGTERM in self._signals)
        age = time.monotonic() - self._signals.setdefault(number, time.monotonic())
        repeated = number in (signal.SIGUSR1, signal.SIGHUP) or (
            number == signal.SIGTERM and age < REPEAT_SECONDS
        )
        if self._ending is not None or (again and repeated):
            return
        exit_code = INTERRUPTED if number == signal.SIGINT else self._launch.requeue_code
        if not again and self._team is not None:
            seconds = self._launch.grace_seconds if number == signal.SIGTERM else None
            self._link.send(StopRequest(exit_code, seconds, SIGNALS[signal.Signals(number)]))
        else:
            self._leave(exit_code)

    def _leave(self, exit_code: int) -> None:
        self._link.send(Leave(exit_code))
        self._end(Abort(exit_code))

    def _out_of_time(self) -> None:
        """Leave with the exit code of a stop, as the kill is near."""
        if self._ending is None:
            self._message(
                "the time is over (cluster.grace_seconds), and the step or its checkpoint is not at its end: "
                "the ranks are ended\n  the same command carries on from the newest checkpoint",
                level="warning",
            )
            self._leave(self._launch.requeue_code)

    # The fork server and its workers -------------------------------------------------------------

    def _fork_server_said(self, _events: int) -> None:
        try:
            while (message := self._node.receive()) is not None:
                match message:
                    case Ready(notes):
                        self._ready = True
                        if self._launch.replanner is not None:
                            self._link.send(Warm())
                        for note in notes:
                            self._message(note, level="warning")
                        self._fork_when_ready()
                    case Started(rank, pid, obstacle):
                        assert self._team is not None
                        self._team.rank(rank).pid = pid
                        if obstacle and not self._told_obstacle:
                            self._told_obstacle = True
                            self._message(
                                f"ranks start one by one instead of by fork: {obstacle}", level="warning"
                            )
                    case Exited(rank, code):
                        assert self._team is not None
                        self._exited(self._team, self._team.rank(rank), code)
        except EOFError:
            self._loop.forget(self._node.control)
            self._fork_server_died()

    def _fork_server_died(self) -> None:
        """Restart the fork server, or end; its workers are killed by the kernel, their children here."""
        self._ready = False
        if self._ending is None:
            how, hint = self._node.last_words()
            number = self._start.node_rank if self._start is not None else None
            place = self._host if number is None else f"node {number} ({self._host})"
            failure = Failure(f"the fork server of {place} {how}", node=number, host=self._host, hint=hint)
            self._fail(failure)
            if self._launch.retries and self._team is not None:
                self._node.close()
                self._node = Node.start(self._launch.preload, self._launch.environment)
                self._loop.watch(self._node.control, self._fork_server_said, selectors.EVENT_READ)
            else:
                self._end(Abort(failure.exit_code, failure))
        if self._team is not None:
            for rank in self._team.ranks:
                if not rank.gone and rank.pid is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(rank.pid, signal.SIGKILL)
            self._count_the_dead(self._team)

    def _count_the_dead(self, team: Team) -> None:
        for rank in team.ranks:
            if not rank.gone and (rank.pid is None or process_state(rank.pid) in ("gone", "dead")):
                rank.code = -signal.SIGKILL
        if team.gone:
            self._when_gone()
        else:
            self._loop.call_later(0.01, lambda: self._count_the_dead(team))

    def _fork_when_ready(self) -> None:
        if not self._ready or self._due is None or self._ending is not None:
            return
        if self._team is not None:
            self._team.close()
        team = self._team = Team(
            self._due,
            self._launch,
            self._node,
            self._loop,
            environment=team_environment(self._launch, self._way, os.environ),
            store_listener=self._store_listener,
            images=self._images,
            failed_at=self._failed.monotonic,
            on_message=self._worker_said,
            on_event=self._on_event,
        )
        self._due = self._store_listener = None
        if self._stop:
            team.request_stop(self._departure.until, self._stop == INTERRUPTED)
        self._departure.watch(team)
        self._loop.call_later(team.watch.period, lambda: self._look(team))
        self._loop.call_later(self._works_period, lambda: self._tell_works(team))

    def _tell_works(self, team: Team) -> None:
        """Send the work time of the ranks here, to be compared with the others'."""
        if self._ending is not None or team is not self._team or team.gone or self._halting:
            return
        self._link.send(Works(team.works()))
        self._loop.call_later(self._works_period, lambda: self._tell_works(team))

    @property
    def _works_period(self) -> float:
        """Time, in seconds, between reports of work time; the coordinator gets at most 100 a second."""
        return max(WINDOW_SECONDS / 2, self._launch.nodes / 100)

    def _worker_said(self, rank: LocalRank, message: Message) -> None:
        match message:
            case Happened(event):
                if what := self._on_event(event):
                    self._wish = what
                    self._link.send(StopRequest(INTERRUPTED, None, what))
            case Failed(failure):
                rank.spoke = True
                self._fail(failure)
            case Finished():
                rank.finished = rank.spoke = True
            case Paused():
                rank.pausing = True
                self._failed.note(self._team)  # lost time counts from here, as after a failure
            case Whereabouts():
                rank.whereabouts = message

    def _exited(self, team: Team, rank: LocalRank, code: int) -> None:
        rank.connection.read()  # its last messages may not have been read yet
        team.note_exit(rank, code)
        rank.connection.close()
        if self._halting:
            self._when_gone()
            return
        if self._ending is not None:
            return
        if not rank.spoke:
            log = str(self._run.log(rank.spec.rank))
            spec, killed = rank.spec, killed_hint(team.kills)
            self._fail(failure_of_exit(code, spec.rank, spec.node_rank, self._host, log, killed))
        if team.finished:
            self._link.send(Paused() if team.paused else Finished())

    def _fail(self, failure: Failure) -> None:
        self._failed.note(self._team)
        self._link.send(Failed(failure))

    # Hangs ---------------------------------------------------------------------------------------

    def _look(self, team: Team) -> None:
        """Check whether any rank has made progress."""
        if self._ending is not None or team is not self._team or team.gone or self._halting:
            return
        self._departure.see(team)
        was_silent = team.watch.silent
        hang = team.watch.look(time.monotonic())
        if hang is not None and not was_silent:
            self._link.send(Hung(*hang))
        elif hang is None and was_silent:
            self._link.send(Moving())
        self._loop.call_later(team.watch.period, lambda: self._look(team))

    def _inspect(self, team: Team) -> None:
        team.inspect()

        def report() -> None:
            if self._ending is None and team is self._team and not self._halting:
                self._link.send(Standings(team.standings(self._host)))

        self._loop.call_later(ANSWER_SECONDS, report)

    def _message(self, text: str, level: str = "info") -> None:
        self._on_event({"kind": "message", "level": level, "text": text})
