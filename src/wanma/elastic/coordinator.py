"""The meeting of the supervisors as a state machine: who takes part, when to start, why it ends.

It knows neither sockets nor clocks: messages come in by `receive` with the name of the peer and the
time, go out by the `send` it was given, and `tick` tells it the time. With one node it is called
directly by the supervisor, with several through `rendezvous`; so both follow the same road.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wanma.elastic.failure import Failure, clip
from wanma.elastic.hang import hang_report
from wanma.elastic.messages import (
    Abort,
    Failed,
    Finished,
    Hung,
    Inspect,
    Join,
    Leave,
    Message,
    Moving,
    Over,
    Refused,
    Standing,
    Standings,
    Start,
    Stop,
    StopRequest,
)

GATHER_SECONDS = 1.0
"""How long a failure that looks like an echo waits for the one that explains it."""
INSPECT_SECONDS = 10.0
"""How long nodes may take to say where their ranks stand."""

REPORT_LIMIT = 256 * 1024
"""Characters of a hang report that travel."""
LOST_HINT = "look at that machine; the same command on every machine carries on from the last checkpoint"

Send = Callable[[int, Message], None]


@dataclass
class _Peer:
    """One supervisor, in order of arrival."""

    join: Join
    node: int = -1
    finished: bool = False
    hung: bool = False


class Coordinator:
    """One run's agreement between its nodes. `generation` counts the starts of its ranks."""

    def __init__(
        self, nodes: int, job_hash: str, place: str, start_seconds: float, send: Send, now: float
    ) -> None:
        self.generation = 0
        self.over = False
        self._nodes, self._job_hash, self._place, self._send = nodes, job_hash, place, send
        self._start_seconds = start_seconds
        self._peers: dict[int, _Peer] = {}
        self._deadline: float | None = now + start_seconds
        self._exit_code = 0
        self._echo: Failure | None = None
        self._hang: Hung | None = None
        self._standings: dict[int, tuple[Standing, ...]] = {}

    @property
    def deadline(self) -> float | None:
        """When `tick` next has something to do; None: not before the next message."""
        return None if self.over else self._deadline

    def receive(self, peer: int, message: Message, now: float) -> None:
        """A message of a peer whose secret has been verified."""
        if isinstance(message, Join):
            self._join(peer, message)
        elif peer in self._peers and not self.over:
            match message:
                case StopRequest(exit_code):
                    self._stop(exit_code)
                case Leave(exit_code):
                    self._end(Abort(exit_code))
                case Failed(failure):
                    self._failed(failure, now)
                case Finished():
                    self._finished(peer)
                case Hung():
                    self._hung(peer, message, now)
                case Moving():
                    self._peers[peer].hung = False
                case Standings(standings):
                    self._standings[peer] = standings
                    self._conclude_hang(late=False)

    def lost(self, peer: int, reason: str, now: float) -> None:
        """A peer's connection has ended."""
        if (gone := self._peers.pop(peer, None)) is None or self.over or gone.finished:
            return
        if self.generation:
            cause = f"node {gone.node} ({gone.join.host}) was lost: {reason}"
            self._failed(Failure(cause, node=gone.node, host=gone.join.host, hint=LOST_HINT), now)

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self.over or self._deadline is None or now < self._deadline:
            return
        self._deadline = None
        if not self.generation:
            here = ", ".join(peer.join.host for peer in self._peers.values())
            cause = (
                f"only {len(self._peers)} of {self._nodes} machines came to {self._place} "
                f"within {self._start_seconds:.0f} s (here: {here})"
            )
            hint = "run the same command on every machine, or raise cluster.start_seconds"
            self._end(Abort(1, Failure(cause, hint=hint)))
        elif self._hang is not None:
            self._conclude_hang(late=True)
        elif self._echo is not None:
            self._end(Abort(self._echo.exit_code, self._echo))

    def _join(self, peer: int, join: Join) -> None:
        if reason := self._objection(join):
            self._send(peer, reason)
            return
        self._peers[peer] = _Peer(join)
        if len(self._peers) == self._nodes:
            self._start()

    def _objection(self, join: Join) -> Refused | None:
        others = [peer.join for peer in self._peers.values()]
        if self.generation or self.over or len(others) == self._nodes:
            return Refused(
                f"the run at {self._place} has its {self._nodes} machines already",
                "wait until it has ended, or choose another port for cluster.rendezvous",
            )
        if join.job_hash != self._job_hash:
            return Refused(
                f"the run at {self._place} is of another job than this machine's, or planned otherwise there",
                "give the same job file and overrides on every machine; where machines are unequal, also "
                "cluster.device and parallel.micro_batch",
            )
        if join.node_rank is not None:
            if join.node_rank >= self._nodes:
                return Refused(f"cluster.node_rank {join.node_rank} is not below cluster.nodes {self._nodes}")
            for other in others:
                if other.node_rank == join.node_rank:
                    return Refused(
                        f"cluster.node_rank {join.node_rank} is taken by {other.host}",
                        "give every machine its own number, or none and let arrival decide",
                    )
        return None

    def _start(self) -> None:
        self.generation += 1
        self._deadline = None
        taken = {peer.join.node_rank for peer in self._peers.values()}
        free = iter(number for number in range(self._nodes) if number not in taken)
        for peer in self._peers.values():
            peer.node = next(free) if peer.join.node_rank is None else peer.join.node_rank
        by_node = sorted(self._peers.items(), key=lambda item: item[1].node)
        world_size = sum(peer.join.ranks for _, peer in by_node)
        store = by_node[0][1].join
        first = 0
        for identity, peer in by_node:
            start = Start(self.generation, peer.node, first, world_size, store.address, store.store_port)
            first += peer.join.ranks
            self._send(identity, start)

    def _stop(self, exit_code: int) -> None:
        self._exit_code = self._exit_code or exit_code
        if self.generation:
            self._broadcast(Stop(self._exit_code))
        else:
            self._end(Abort(exit_code))

    def _failed(self, failure: Failure, now: float) -> None:
        if not failure.consequence:
            self._end(Abort(failure.exit_code, failure))
        elif self._echo is None:
            self._echo = failure
            self._deadline = now + GATHER_SECONDS

    def _finished(self, peer: int) -> None:
        self._peers[peer].finished = True
        if all(other.finished for other in self._peers.values()) and self._echo is None:
            self._end(Over(self._exit_code))

    def _hung(self, peer: int, hang: Hung, now: float) -> None:
        """One silent node may be waiting for another that works: all must be silent."""
        self._peers[peer].hung = True
        if self._hang is None and all(other.hung or other.finished for other in self._peers.values()):
            self._hang = hang
            self._deadline = now + INSPECT_SECONDS
            self._broadcast(Inspect())

    def _conclude_hang(self, late: bool) -> None:
        if self._hang is not None and (late or len(self._standings) == len(self._peers)):
            standings = [one for node in self._standings.values() for one in node]
            summary, report = hang_report(standings, self._hang.seconds, self._hang.limit)
            hint = "the stacks are in logs/hang-report.txt of the run directory"
            self._end(Abort(1, Failure(clip(summary), hint=hint), clip(report, REPORT_LIMIT)))

    def _end(self, word: Abort | Over) -> None:
        self.over = True
        self._broadcast(word)

    def _broadcast(self, message: Message) -> None:
        for peer in list(self._peers):
            self._send(peer, message)
