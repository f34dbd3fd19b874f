"""Thread that claims a generation beside the supervisor's event loop, which sends heartbeats meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from wanma.elastic.transport.event_loop import EventLoop
from wanma.job.errors import WanmaError
from wanma.job.run.generation_claims import Claim, ClaimStore

logger = logging.getLogger("wanma.elastic")

RETRY_SECONDS = 2.0
"""Time, in seconds, between two attempts to reach a store."""


def claim_in_thread(
    claims: ClaimStore,
    claim: Claim,
    timeout_seconds: float,
    loop: EventLoop,
    on_answer: Callable[[Claim, bool], None],
) -> None:
    """Call `on_answer(claim, is_claimed)` in the loop once the store has answered.

    A store that cannot be reached is tried again, for `timeout_seconds`; then the loop raises `WanmaError`.
    """

    def create() -> bool:
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                return claims.create(claim)
            except OSError as error:
                if time.monotonic() + RETRY_SECONDS > deadline:
                    raise _unreachable_error(claims, claim, error) from error
                logger.warning("cannot claim generation %d; trying again: %s", claim.generation, error)
                time.sleep(RETRY_SECONDS)

    loop.call_in_thread(create, lambda is_claimed: on_answer(claim, is_claimed), "wanma-claim")


def _unreachable_error(claims: ClaimStore, claim: Claim, error: OSError) -> WanmaError:
    return WanmaError(
        f"cannot claim generation {claim.generation} in {claims.location}: {error.strerror or error}",
        "check the network and the credentials of cluster.claims; the same command continues the run",
    )
