"""Configuration of a coordinator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wanma.elastic.coordinator.failover import Past


@dataclass(frozen=True)
class Terms:
    """Configuration of a coordinator and of its run."""

    nodes: int
    """Most nodes that take part."""
    job_hash: str
    place: str
    """Endpoint of the run, in words."""
    start_seconds: float
    """Time, in seconds, that the coordinator waits for nodes."""
    retries: int = 0
    """Most recoveries without a new step between them."""
    slow_factor: float = 1.5
    claim: Callable[[int], int | None] = lambda generation: generation
    """Function that claims a generation, or the next that is free, before each start.

    It returns the claimed number; None: another coordinator has the run, and the server sends the nodes
    there.
    """
    generation: int = 0
    """Number of the newest start so far."""
    past: Past | None = None
    """Run of a lost coordinator that this one takes over; None: a new run."""
    silent_retries: int = 0
    """Most recoveries, of `retries`, of ranks that have never finished a step."""
