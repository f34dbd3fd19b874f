"""Heartbeat of the coordinator's claim in the claim store, and detection of a newer claim."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from collections.abc import Callable

from wanma.elastic.transport.event_loop import EventLoop
from wanma.job.run.generation_claims import Claim, ClaimStore

logger = logging.getLogger("wanma.elastic")


class ClaimHeartbeat:
    """Claim heartbeat: calls `on_superseded(claim)` in the loop, once, for a claim after `newest_generation`.

    It works in a thread of its own: a store that hangs must not delay the supervisors'
    heartbeats.

    Args:
        loop: event loop.
        claims: claim store of the run.
        coordinator_id: name of the coordinator.
        newest_generation: generation of the newest claim so far, the coordinator's own or one that it is to
            follow.
        interval_seconds: time between two checks.
        on_superseded: gets the newer claim.
    """

    def __init__(
        self,
        loop: EventLoop,
        claims: ClaimStore,
        coordinator_id: str,
        newest_generation: int,
        interval_seconds: float,
        on_superseded: Callable[[Claim], None],
    ) -> None:
        self.newest_generation = newest_generation
        self.owns_claim = False
        """True if `newest_generation` is the coordinator's own claim, which is then kept alive."""
        self._loop, self._claims, self._coordinator_id = loop, claims, coordinator_id
        self._interval_seconds, self._on_superseded = interval_seconds, on_superseded
        self._newest: Claim | None = None
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._stop_event = threading.Event()
        loop.watch(self._reader, self._handle_newer_claim, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._heartbeat_loop, name="wanma-beacon", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; the thread may still wait for a disk, but does nothing any more."""
        self._stop_event.set()
        self._loop.unwatch(self._reader)
        self._reader.close()

    def _heartbeat_loop(self) -> None:
        failing = False
        while not self._stop_event.wait(self._interval_seconds):
            try:
                newest = self._claims.newest_after(self.newest_generation)
                # The coordinator may be about to claim the next number, so `newest_generation` alone does not
                # tell.
                if (
                    newest is not None
                    and newest.generation > self.newest_generation
                    and self._is_foreign(newest)
                ):
                    self._newest = newest
                    break
                if self.owns_claim:
                    self._claims.write_heartbeat(self.newest_generation)
                failing = False
            except OSError as error:
                if not failing:
                    logger.warning(
                        "%s: cannot renew the coordinator's claim: %s", self._claims.location, error
                    )
                failing = True
        self._writer.close()  # wakes the loop

    def _is_foreign(self, claim: Claim) -> bool:
        return claim.place != "" and claim.coordinator != self._coordinator_id

    def _handle_newer_claim(self, _events: int) -> None:
        self.close()
        assert self._newest is not None
        self._on_superseded(self._newest)
