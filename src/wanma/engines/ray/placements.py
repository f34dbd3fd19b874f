"""Placement groups and actors of a run in Ray, found by the prefix of their names; needs a connection."""

from __future__ import annotations

import contextlib
from typing import Any

NAMESPACE = "wanma"
"""Namespace of Ray that holds the actors of all runs."""


def group_name(prefix: str, group: int) -> str:
    """Return the name of a placement group of a run; group 0 holds its first nodes."""
    return f"{prefix}g{group}"


def actor_name(prefix: str, group: int, index: int) -> str:
    """Return the name of the actor of a node, whose group is `actor_group`."""
    return f"{group_name(prefix, group)}-{index}"


def actor_group(name: str) -> str:
    """Return the name of the placement group of an actor."""
    return name.rpartition("-")[0]


def actor_index(name: str) -> int:
    """Return the index of an actor's node."""
    return int(name.rpartition("-")[2])


def find_groups(prefix: str) -> dict[str, dict[str, Any]]:
    """Return the placement groups of a run by name, without removed ones.

    Each has `state` (PENDING, CREATED, RESCHEDULING), `nodes`: node of each bundle, and `is_infeasible`.
    """
    import ray

    return {
        group["name"]: {
            "state": group["state"],
            "nodes": list(group["bundles_to_node_id"].values()),
            "is_infeasible": group["stats"].get("scheduling_state") == "INFEASIBLE",
        }
        for group in ray.util.placement_group_table().values()
        if group["name"].startswith(prefix) and group["state"] != "REMOVED"
    }


def find_actors(prefix: str) -> list[str]:
    """Return the names of the actors of a run that live or wait."""
    import ray

    return [name for name in ray.util.list_named_actors() if name.startswith(prefix)]


def remove_run(prefix: str, *, last: str = "") -> None:
    """Remove the actors and placement groups of a run; the actor `last` at the end."""
    for name in sorted(find_actors(prefix), key=lambda name: name == last):
        if name != last:
            remove_actor(name)
    for name in find_groups(prefix):
        remove_group(name)  # ends `last`, too, which is in one of them


def remove_actor(name: str) -> None:
    """End an actor that lives or waits; one that has ended stays as it is."""
    import ray

    with contextlib.suppress(ValueError, ray.exceptions.RayError):
        ray.kill(ray.get_actor(name))


def remove_group(name: str) -> None:
    """Remove a placement group, which ends its actors; a removed one stays as it is."""
    import ray

    with contextlib.suppress(ValueError, ray.exceptions.RayError):
        ray.util.remove_placement_group(ray.util.get_placement_group(name))
