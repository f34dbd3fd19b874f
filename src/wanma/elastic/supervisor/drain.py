"""Drain of one node: deadlines from the stop command to the kill that follows it.

The ranks are asked to stop after their step, and save. If that will not end in time, the node reports it
(`Late`), and the coordinator ends all ranks and asks the nodes to flush their in-memory checkpoints
(`Rescue`, `elastic/recovery/flush_process.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from wanma.elastic.launch_config import Launch
from wanma.elastic.protocol.messages import Late, Message, Rescue, Stop
from wanma.elastic.recovery.flush_deadline import StepPace, give_up_at, leave_at
from wanma.elastic.recovery.flush_process import Order, Rescuer
from wanma.elastic.recovery.in_memory_checkpoint_files import ImageFiles
from wanma.elastic.supervisor.worker_group import Team
from wanma.elastic.transport.event_loop import Loop
from wanma.observe.units import duration_text

ANSWER_SECONDS = 0.5
"""Time, in seconds, to learn the results of the other nodes' flushes."""


class Departure:
    """Drain controller of one node.

    Args:
        launch: launch configuration.
        loop: event loop.
        images: files of the ranks' in-memory checkpoints; None: there are none.
        send: sends a message to the coordinator.
        tell: shows a text to the user of this node.
        out_of_time: called when the node has to leave as it is.
    """

    def __init__(
        self,
        launch: Launch,
        loop: Loop,
        images: ImageFiles | None,
        send: Callable[[Message], None],
        tell: Callable[[str], None],
        out_of_time: Callable[[], None],
    ) -> None:
        self._launch, self._loop, self._images = launch, loop, images
        self._send, self._tell, self._out_of_time = send, tell, out_of_time
        self.until: float | None = None
        """Time of the kill; None: no kill was announced."""
        self._team: Team | None = None
        self._pace = StepPace()
        self._rescuer: Rescuer | None = None

    def watch(self, team: Team) -> None:
        """Watch the ranks of a generation, once they exist."""
        self._team, self._pace = team, StepPace()
        if self.until is not None:
            self._look(team)

    def see(self, team: Team) -> None:
        """Update the estimate of a step's time; called every now and then."""
        self._pace.see(team.positions())

    def begin(self, stop: Stop) -> bool:
        """Process a stop command, and return True if it brings a new deadline."""
        if stop.seconds is None:
            return False
        until = time.monotonic() + stop.seconds
        if self.until is not None and until >= self.until - 1.0:  # each node's own order, about the same
            return False
        self.until = until
        self._loop.call_later(leave_at(until) - time.monotonic(), lambda: self._end(until))
        if self._team is not None:
            self._look(self._team)
        return True

    def rescue(self, order: Rescue, generation: int) -> None:
        """Flush the in-memory checkpoints that the command names; the answer goes to the coordinator."""
        assert self._images is not None
        found = self._images.found(order.image)
        if self._rescuer is not None:
            self._rescuer.close()
        names = [f"{generation}-rescue-{number}" for number in range(1, order.attempt + 1)]
        if not order.is_last_word and order.attempt == 1:
            folder = self._launch.run_directory / "checkpoints"
            self._tell(
                f"the ranks have {duration_text(order.seconds)} left: the copy in memory of step "
                f"{order.image.step:,} is written to {folder}"
            )
        self._rescuer = Rescuer(
            Order(
                run_directory=str(self._launch.run_directory),
                images={str(rank): found[str(rank)][0] for rank in order.ranks},
                world_size=order.world_size,
                name=names[-1],
                given_up=tuple(names[:-1]),
                is_apart=order.is_apart,
                deadline=leave_at(time.monotonic() + order.seconds) - ANSWER_SECONDS,
                upload=self._launch.upload,
                is_last_word=order.is_last_word,
            ),
            self._loop,
            lambda answer: self._send(replace(answer, attempt=order.attempt)),
        )

    def close(self) -> None:
        """End a flush in progress."""
        self._team = None
        if self._rescuer is not None:
            self._rescuer.close()
            self._rescuer = None

    def _look(self, team: Team) -> None:
        """Report `Late` if the current step will not end in time; else check again later."""
        if team is not self._team or team.gone or self.until is None or self._rescuer is not None:
            return
        positions = team.positions()
        self._pace.see(positions)
        copies = self._images.copy_bytes() if self._images is not None else 0
        if not copies or any(position.leaving for position in positions):
            return  # there is nothing else to write, or the ranks are saving
        now = time.monotonic()
        places = 2 if self._launch.upload is not None else 1
        at = give_up_at(now, self.until, copies, self._pace.began, self._pace.step_seconds, places)
        if at <= now:
            self._send(Late())
        else:
            self._loop.call_later(at - now, lambda: self._look(team))

    def _end(self, until: float) -> None:
        if until == self.until and self._team is not None:
            self._out_of_time()
