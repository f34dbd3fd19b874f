"""Configuration of a coordinator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from wanma.elastic.coordinator.failover import InheritedRun

ROOT_CAUSE_WAIT_SECONDS = 1.0
"""Time, in seconds, that a secondary failure waits for its root cause."""
STATUS_TIMEOUT_SECONDS = 10.0
"""Time, in seconds, that nodes may take to report the status of their ranks."""
TERMINATION_TIMEOUT_SECONDS = 60.0
"""Time, in seconds, that nodes may take to end their ranks: a killed process first frees its memory."""
ClaimGeneration = Callable[[int], int | Literal["pending"] | None]


@dataclass(frozen=True)
class CoordinatorConfig:
    """Configuration of a coordinator and of its run."""

    nodes: int
    """Most nodes that take part."""
    job_hash: str
    endpoint: str
    """Endpoint of the run, in words."""
    start_timeout_seconds: float
    """Time, in seconds, that the coordinator waits for nodes."""
    max_restarts: int = 0
    """Most recoveries without a new step between them."""
    straggler_factor: float = 1.5
    claim_generation: ClaimGeneration = lambda generation: generation
    """Function that claims a generation, or the next that is free, before each start.

    It returns the claimed number; None: another coordinator has the run, and the server sends the nodes
    there; "pending": the store has not answered yet, and `resume_start` is called when it has.
    """
    generation: int = 0
    """Number of the newest start so far."""
    inherited_run: InheritedRun | None = None
    """Run of a lost coordinator that this one takes over; None: a new run."""
    max_restarts_before_first_step: int | None = None
    """Most recoveries, of `max_restarts`, of ranks that have never finished a step, as in `LaunchConfig`."""
    min_nodes: int = 0
    """Least nodes of an elastic run."""
    last_call_seconds: float = 30.0
    """Last call: time, in seconds, that its first start waits for more than `min_nodes` nodes."""
