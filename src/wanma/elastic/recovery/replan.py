"""Re-plan of a run whose number of nodes has changed: request and decision, as pure data.

The planner decides, of which this room knows nothing: a run that may shrink and grow brings a `Replanner`
with its launch configuration. The choice of the nodes that take part is here, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any

from wanma.elastic.protocol.messages import InMemoryCheckpointShard
from wanma.elastic.recovery.restart_policy import find_newest_complete_checkpoint
from wanma.job.plan.plan import Plan

_MAX_TRIED_SELECTIONS = 1000
"""Most sets of nodes that are tried to find one with a complete newest in-memory checkpoint."""


@dataclass(frozen=True)
class ReplanRequest:
    """Request for a plan: facts that the coordinator knows."""

    available_nodes: int
    """Number of nodes that are present."""
    current_plan: Plan | None = None
    """Plan of the newest generation; None: nothing has run yet."""
    current_nodes: int = 0
    """Number of nodes that it used."""
    last_finished_step: int = 0
    """Newest finished step."""
    step_seconds: float | None = None
    """Measured time of a step under that plan, in seconds; None: unknown."""
    startup_seconds: float | None = None
    """Measured time from a start of the ranks to their first finished step, in seconds; None: unknown."""


@dataclass(frozen=True)
class ReplanDecision:
    """Decision of the planner."""

    plan: Plan | None
    """Plan of the next generation; None: there is none for the nodes that are present."""
    nodes: int
    """Number of nodes that it uses; the others stand by."""
    reason: str
    forecast: dict[str, Any] | None = None
    """Forecast of the plan, as `Forecast.to_json`."""


def select_nodes_with_state(
    shards_by_node: Mapping[int, Iterable[InMemoryCheckpointShard]], count: int, world_size: int
) -> tuple[int, ...]:
    """Choose `count` nodes that together hold a complete copy of the newest in-memory checkpoint there is.

    Args:
        shards_by_node: node → its in-memory checkpoints, in the order in which nodes are preferred.
        count: number of nodes to choose.
        world_size: of the newest generation.
    """
    newest = find_newest_complete_checkpoint(
        [shard for shards in shards_by_node.values() for shard in shards], world_size
    )
    first = tuple(shards_by_node)[:count]
    if newest is None:
        return first
    for chosen in islice(combinations(shards_by_node, count), _MAX_TRIED_SELECTIONS):
        shards = [shard for machine in chosen for shard in shards_by_node[machine]]
        if find_newest_complete_checkpoint(shards, world_size) == newest:
            return chosen
    return first


def standby_text(joined_nodes: int, max_nodes: int, used_nodes: int, decision: ReplanDecision) -> str:
    """Return the notice to all nodes when some are on standby."""
    standby = joined_nodes - used_nodes
    spare = "1 node is" if standby == 1 else f"{standby} nodes are"
    used = f"{used_nodes} of {joined_nodes} joined nodes (at most {max_nodes})"
    return f"the run uses {used}; {spare} on standby\n  {decision.reason}"
