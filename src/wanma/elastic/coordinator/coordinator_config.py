"""What a coordinator begins with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wanma.elastic.coordinator.failover import Past


@dataclass(frozen=True)
class Terms:
    """Of one run, and of the coordinator's part in it."""

    nodes: int
    """The most that take part."""
    job_hash: str
    place: str
    """Where they meet, in words."""
    start_seconds: float
    """How long machines are waited for."""
    retries: int = 0
    """Recoveries without a new step between them."""
    slow_factor: float = 1.5
    claim: Callable[[int], int | None] = lambda generation: generation
    """Asked before each start for that generation, or the next that is free; None: another coordinator has
    the run, and whoever drives this one sends its nodes there."""
    generation: int = 0
    """The number of the newest start so far."""
    past: Past | None = None
    """The run of a coordinator that has been lost, to be carried on."""
    silent_retries: int = 0
    """Most recoveries, of `retries`, of ranks that have never finished a step."""
