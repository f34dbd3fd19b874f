"""Heartbeat of the coordinator's claim in the run directory, and detection of a newer claim."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from wanma.elastic.transport.event_loop import Loop
from wanma.job.run import generation_claims
from wanma.job.run.generation_claims import Claim

logger = logging.getLogger("wanma.elastic")


class Beacon:
    """Claim heartbeat: calls `on_followed(claim)` in the loop, once, for another's claim newer than `held`.

    It works in a thread of its own: a shared file system that hangs must not delay the supervisors'
    heartbeats.

    Args:
        loop: event loop.
        run: run directory.
        name: name of the coordinator.
        held: generation of the newest claim so far, the coordinator's own or one that it is to follow.
        seconds: time between two checks.
        on_followed: gets the newer claim.
    """

    def __init__(
        self,
        loop: Loop,
        run: Path,
        name: str,
        held: int,
        seconds: float,
        on_followed: Callable[[Claim], None],
    ) -> None:
        self.held = held
        self.mine = False
        """True if `held` is the coordinator's own claim, which is then kept alive."""
        self._loop, self._run, self._name = loop, run, name
        self._seconds, self._on_followed = seconds, on_followed
        self._newest: Claim | None = None
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._done = threading.Event()
        loop.watch(self._reader, self._heard, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._shine, name="wanma-beacon", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; the thread may still wait for a disk, but does nothing any more."""
        self._done.set()
        self._loop.forget(self._reader)
        self._reader.close()

    def _shine(self) -> None:
        failing = False
        while not self._done.wait(self._seconds):
            try:
                newest = generation_claims.newest(self._run)
                # The coordinator may be about to claim the next number, so `held` alone does not tell.
                if newest is not None and newest.generation > self.held and self._is_another_s(newest):
                    self._newest = newest
                    break
                if self.mine:
                    generation_claims.beat(self._run, self.held)
                failing = False
            except OSError as error:
                if not failing:
                    logger.warning("%s: no sign of life can be left there: %s", self._run, error)
                failing = True
        self._writer.close()  # wakes the loop

    def _is_another_s(self, claim: Claim) -> bool:
        return claim.place != "" and claim.coordinator != self._name

    def _heard(self, _events: int) -> None:
        self.close()
        assert self._newest is not None
        self._on_followed(self._newest)
