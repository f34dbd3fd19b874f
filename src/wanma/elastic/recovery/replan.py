"""Re-plan of a run whose number of nodes has changed: request and decision, as pure data.

The planner decides, of which this room knows nothing: a run that may shrink and grow brings a `Replanner`
with its launch configuration. The choice of the nodes that take part is here, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any

from wanma.elastic.protocol.messages import HeldImage
from wanma.elastic.recovery.restart_policy import newest_whole
from wanma.job.plan.plan import Plan

_TRIED = 1000
"""Most sets of nodes that are tried to find one with a complete newest in-memory checkpoint."""


@dataclass(frozen=True)
class Situation:
    """Request for a plan: facts that the coordinator knows."""

    machines: int
    """Number of nodes that are present."""
    running: Plan | None = None
    """Plan of the newest generation; None: nothing has run yet."""
    nodes: int = 0
    """Number of nodes that it used."""
    step: int = 0
    """Newest finished step."""
    step_seconds: float | None = None
    """Measured time of a step under that plan, in seconds; None: unknown."""
    start_seconds: float | None = None
    """Measured time from a start of the ranks to their first finished step, in seconds; None: unknown."""


@dataclass(frozen=True)
class Decision:
    """Decision of the planner."""

    plan: Plan | None
    """Plan of the next generation; None: there is none for the nodes that are present."""
    nodes: int
    """Number of nodes that it uses; the others stand by."""
    reason: str
    forecast: dict[str, Any] | None = None
    """Forecast of the plan, as `Forecast.to_json`."""


def choose_nodes(held: Mapping[int, Iterable[HeldImage]], count: int, world_size: int) -> tuple[int, ...]:
    """Choose `count` nodes that together hold a complete copy of the newest in-memory checkpoint there is.

    Args:
        held: node → its in-memory checkpoints, in the order in which nodes are preferred.
        count: number of nodes to choose.
        world_size: of the newest generation.
    """
    everything = newest_whole([one for images in held.values() for one in images], world_size)
    first = tuple(held)[:count]
    if everything is None:
        return first
    for chosen in islice(combinations(held, count), _TRIED):
        images = [one for machine in chosen for one in held[machine]]
        if newest_whole(images, world_size) == everything:
            return chosen
    return first


def spare_text(here: int, most: int, used: int, decision: Decision) -> str:
    """Return the notice to all nodes when some stand by."""
    spare = "1 machine stands" if here - used == 1 else f"{here - used} machines stand"
    return f"the run uses {used} of {here} machines (at most {most}), and {spare} by\n  {decision.reason}"
