"""Worker group: the ranks of one generation on this node, their processes and their progress board."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping

from wanma.checkpoint.in_memory.partner_ring import guests_of
from wanma.elastic.coordinator.user_notices import RESTARTED
from wanma.elastic.diagnosis.hang_detector import Watch
from wanma.elastic.launch_config import Launch
from wanma.elastic.protocol.local_messages import Fork, KeepStore, Signal, WorkerSpec
from wanma.elastic.protocol.messages import Inspect, Message, RankWork, Recovery, Standing, Start
from wanma.elastic.recovery.in_memory_checkpoint_files import ImageFiles
from wanma.elastic.supervisor.worker_handle import LocalRank
from wanma.elastic.transport.event_loop import Loop
from wanma.elastic.workers.fork_server_handle import Node
from wanma.elastic.workers.progress_board import Board, Position
from wanma.elastic.workers.worker_output import Output
from wanma.hardware.discovery.network_interfaces import VARIABLES, Way
from wanma.hardware.discovery.resource_limits import memory_kills
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import Event, Restart


class Team:
    """Worker group of a generation on this node, forked by its constructor.

    Args:
        start: start command of the generation.
        launch: launch configuration.
        node: fork server.
        loop: event loop.
        environment: added to that of the ranks.
        store_listener: socket at which rank 0, if it is here, serves the rendezvous store; closed here.
        images: files of the ranks' in-memory checkpoints; None: there are none.
        failed_at: time at which the generation before failed, on the monotonic clock.
        on_message: gets the ranks' messages.
        on_event: gets the output of a script's ranks, and the notice of their restart.
    """

    def __init__(
        self,
        start: Start,
        launch: Launch,
        node: Node,
        loop: Loop,
        *,
        environment: Mapping[str, str],
        store_listener: socket.socket | None,
        images: ImageFiles | None,
        failed_at: float,
        on_message: Callable[[LocalRank, Message], None],
        on_event: Callable[[Event], object],
    ) -> None:
        self.start = start
        self._launch, self._loop = launch, loop
        self._stopping = False
        self.board = Board.create(launch.ranks_per_node)
        self.watch = Watch(self.board, launch, time.monotonic())
        self.ranks: list[LocalRank] = []
        self.kills = memory_kills()
        """Number of the kernel's out-of-memory kills before the start."""
        self._node = node
        self._output = self._shown(on_event) if launch.is_script else None
        if launch.is_script and start.first_rank == 0 and store_listener is not None:
            node.send(KeepStore(start.store_host, start.store_port), [store_listener.fileno()])
            store_listener.close()
            store_listener = None
        payload = os.memfd_create("wanma-payload", os.MFD_CLOEXEC)
        with open(payload, "wb", closefd=False) as file:
            file.write(launch.payload)
        recovery = start.recovery
        restore = recovery.image if recovery is not None else None
        found = images.found(restore) if images is not None and restore is not None else {}
        if images is not None:
            mine = range(start.first_rank, start.first_rank + launch.ranks_per_node)
            guests = [guest for rank in mine for guest in guests_of(rank, start.ranks_by_node)]
            images.arrange(launch.ranks_per_node, sorted(guests), restore)
        restart = _restart_of(recovery, failed_at) if recovery is not None else None
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
                threads=launch.threads_per_rank,
                store_host=start.store_host,
                store_port=start.store_port,
                environment=dict(environment),
                images=images.to_write(local_rank, restore) if images is not None else (),
                found=found,
                restore_step=restore.step if restore is not None else None,
                guests=images.for_guests(number, start.ranks_by_node, restore) if images is not None else {},
                ranks_by_node=start.ranks_by_node,
                restart=restart,
                claimed=launch.nodes > 1,
            )
            rank = LocalRank(spec, loop, on_message)
            self.ranks.append(rank)
            descriptors = [rank.child.fileno(), self.board.descriptor, payload, rank.stacks]
            if spec.rank == 0 and store_listener is not None:
                descriptors.append(store_listener.fileno())
            node.send(Fork(spec), descriptors)
            rank.child.close()
        os.close(payload)
        if store_listener is not None:
            store_listener.close()

    def _shown(self, on_event: Callable[[Event], object]) -> Output:
        run, first = RunDirectory(self._launch.run_directory), self.start.first_rank
        ranks = range(first, first + self._launch.ranks_per_node)
        if (recovery := self.start.recovery) is not None:
            on_event({"kind": RESTARTED, "failure": recovery.failure})
        return Output([(rank, run.log(rank)) for rank in ranks], self._loop, on_event)

    @property
    def is_outside(self) -> bool:
        """True if the ranks run a script, and none of them has a session open."""
        return self._launch.is_script and all(position.is_outside for position in self.positions())

    @property
    def gone(self) -> bool:
        """True if no rank lives any more."""
        return all(rank.gone for rank in self.ranks)

    @property
    def finished(self) -> bool:
        """True if all ranks did their work and have left."""
        return all(rank.finished and rank.gone for rank in self.ranks)

    @property
    def reached_step(self) -> int | None:
        """Newest step that one of the ranks has finished; None: none has."""
        return max((at.done for at in self.positions() if at.done is not None), default=None)

    @property
    def came_to(self) -> tuple[int | None, int]:
        """Newest step (`reached_step`), and finished steps at the ranks' position (0 before a report)."""
        return self.reached_step, max((at.step for at in self.positions() if at.calls), default=0)

    def positions(self) -> list[Position]:
        """Return the last reports of the ranks."""
        return [self.board.read(rank.spec.local_rank) for rank in self.ranks]

    def works(self) -> tuple[RankWork, ...]:
        """Return the work time of the ranks so far."""
        works = ((rank.spec.rank, self.board.work(rank.spec.local_rank)) for rank in self.ranks)
        return tuple(
            RankWork(rank, work.steps, work.group, work.data_seconds, work.compute_seconds)
            for rank, work in works
        )

    @property
    def paused(self) -> bool:
        """True if the ranks are suspended: they have left with in-memory checkpoints."""
        return self.finished and all(rank.pausing for rank in self.ranks)

    def rank(self, number: int) -> LocalRank:
        return self.ranks[number - self.start.first_rank]

    def request_stop(self, until: float | None, by_interrupt: bool) -> None:
        """Request an orderly stop; a script without a session gets the signal that a terminal would send.

        Args:
            until: deadline for the ranks, on the monotonic clock; None: no kill was announced.
            by_interrupt: True if a Ctrl-C is the cause.
        """
        self.board.request_stop(until)
        if not self._launch.is_script or self._stopping:
            return
        self._stopping = True
        for rank in self.ranks:
            if self._is_outside(rank):
                number = signal.SIGINT if by_interrupt else signal.SIGTERM
                self._node.send(Signal(rank.spec.rank, number, group=False))
        self._loop.call_later(self._launch.grace_seconds, self._end_outsiders)

    def _end_outsiders(self) -> None:
        """Kill scripts that did not leave when they were asked to."""
        for rank in self.ranks:
            if self._is_outside(rank):
                self._node.send(Signal(rank.spec.rank, signal.SIGKILL, group=True))

    def _is_outside(self, rank: LocalRank) -> bool:
        return not rank.gone and self.board.read(rank.spec.local_rank).is_outside

    def note_exit(self, rank: LocalRank, code: int) -> None:
        """Note the end of a rank's process; a script may have done its work without a report.

        Its own `os._exit(0)` counts as done, and so does any end after it was asked to stop.
        """
        asked = self._stopping and self._is_outside(rank)
        if self._launch.is_script and not rank.spoke and (code == 0 or asked):
            rank.finished = rank.spoke = True
        if self._output is not None:
            self._output.flush()
        rank.code = code

    def kill(self, number: signal.Signals) -> None:
        """Send a signal to the living ranks and all processes that they started."""
        for rank in self.ranks:
            if not rank.gone:
                self._node.send(Signal(rank.spec.rank, number, group=True))

    def inspect(self) -> None:
        """Ask the living ranks for their status."""
        for rank in self.ranks:
            if not rank.gone:
                rank.connection.send(Inspect())
                self._node.send(Signal(rank.spec.rank, signal.SIGUSR1, group=False))

    def standings(self, host: str) -> tuple[Standing, ...]:
        """Return the status of the living ranks, some time after `inspect`."""
        now = time.monotonic()
        return tuple(rank.standing(self.board, host, now) for rank in self.ranks if not rank.gone)

    def close(self) -> None:
        if self._output is not None:
            self._output.close()
        for rank in self.ranks:
            rank.close()
        self.board.close()


def team_environment(launch: Launch, way: Way, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return additions to the workers' environment, which keep torch's sockets on the nodes' interface.

    The user's own variables count, unless the job names an interface.

    Args:
        launch: launch configuration.
        way: interface and address by which this node and the others reach each other.
        inherited: environment that the workers have besides.
    """
    added = {**launch.environment, "OMP_NUM_THREADS": str(launch.threads_per_rank)}
    if way.interface is not None:
        # NCCL takes a name as a prefix (eth1, and eth10 too) unless told otherwise.
        for variable, value in zip(VARIABLES, (way.interface, f"={way.interface}"), strict=True):
            if launch.interface is not None or variable not in inherited:
                added.setdefault(variable, value)
    return added


def _restart_of(recovery: Recovery, failed_at: float) -> Restart:
    """Return what workers learn of the failure before their start."""
    return Restart(
        recovery.failure,
        failed_at,
        recovery.reached_step,
        recovery.attempt,
        recovery.retried_steps,
        recovery.change,
        recovery.kept_step,
    )
