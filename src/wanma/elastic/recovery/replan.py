"""On how many machines a run goes on, and under which plan: what is asked, and what is answered.

The answer is the planner's, of which this room knows nothing: whoever launches a run that may shrink and grow
gives a `Replanner` with it (`launch`). Pure data, and the choice of the machines that take part.
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
"""Sets of machines, at most, of which one is to hold all of the newest state."""


@dataclass(frozen=True)
class Situation:
    """What the coordinator asks about."""

    machines: int
    """That are here."""
    running: Plan | None = None
    """Of the newest generation; None: nothing has run yet."""
    nodes: int = 0
    """Machines that it used."""
    step: int = 0
    """Newest step that was finished."""
    step_seconds: float | None = None
    """Under that plan, where anybody has measured it."""
    start_seconds: float | None = None
    """That a start of ranks has taken up to their first step, likewise."""


@dataclass(frozen=True)
class Decision:
    """How the run goes on."""

    plan: Plan | None
    """None: there is none for the machines that are here."""
    nodes: int
    """Machines that it uses; the others stand by."""
    reason: str
    forecast: dict[str, Any] | None = None
    """As `Forecast.to_json`."""


def choose_nodes(held: Mapping[int, Iterable[HeldImage]], count: int, world_size: int) -> tuple[int, ...]:
    """`count` of the machines, such that together they hold a whole copy of the newest state there is.

    Args:
        held: machine -> images that are there, in the order in which machines are preferred.
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
    """What all machines are told where some stand by."""
    spare = "1 machine stands" if here - used == 1 else f"{here - used} machines stand"
    return f"the run uses {used} of {here} machines (at most {most}), and {spare} by\n  {decision.reason}"
