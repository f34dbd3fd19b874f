"""Program that asks Ray for an engine: a JSON object a line on standard input, and an answer a line.

    python -P -m wanma.engines.ray.bridge

It ends with its standard input. What Ray prints goes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
from typing import Any

from wanma.engines.ray.node_actor import NodeActor, find_actors, find_groups, remove_groups
from wanma.job.errors import WanmaError

NAMESPACE = "wanma"
"""Namespace of Ray that holds the actors of all runs."""
ANSWER_SECONDS = 5.0
"""Deadline, in seconds, of a head node's port, and of an actor."""
GRANT_SECONDS = 2
"""Time, in whole seconds, in which Ray grants a placement group for which nodes are free."""
START_SECONDS = 60.0
"""Time, in seconds, that an actor may take to start."""
_HINT = "start one with `ray start`, or correct cluster.ray.address, e.g. to that of its head node"


def connect(address: str) -> str:
    """Connect to the Ray cluster; return the address of its head node.

    Raises:
        WanmaError: there is none, or it has another version of Ray or Python.
    """
    import ray

    host, _, port = address.rpartition(":")
    try:
        if host:
            socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
        context = ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        raise explain_refusal(str(error), address) from error
    return str(context.address_info["gcs_address"])


def explain_refusal(text: str, address: str) -> WanmaError:
    """Return Ray's refusal of a connection with its meaning and the way out."""
    versions = re.findall(r"Ray: (\S+)\s+Python: (\S+)", text)
    if len(versions) == 2:
        (ray_there, python_there), (ray_here, python_here) = versions
        return WanmaError(
            f"the Ray cluster at {address} has Ray {ray_there} with Python {python_there}, and this is Ray "
            f"{ray_here} with Python {python_here}",
            f"install ray=={ray_there} in an environment with Python {python_there}",
        )
    return WanmaError(f"no Ray cluster at the address '{address}': {text.strip().splitlines()[-1]}", _HINT)


def list_nodes() -> list[dict[str, Any]]:
    """Return the nodes that live: `id`, `host`, all `resources`, and those that are `available` now."""
    import ray
    from ray._private.state import available_resources_per_node  # elsewhere only the dashboard has it

    free, nodes = available_resources_per_node(), [node for node in ray.nodes() if node["Alive"]]
    return [
        {
            "id": node["NodeID"],
            "host": node["NodeManagerHostname"],
            "resources": node["Resources"],
            "available": free.get(node["NodeID"], {}),
        }
        for node in nodes
    ]


def start_nodes(
    groups: dict[str, int],
    bundle: dict[str, float],
    actors: dict[str, int],
    preferred: list[str],
    request: dict[str, Any],
) -> bool:
    """Create placement groups, and actors in bundles; return False if some wait for nodes.

    The first nodes of a run have started when it returns; nodes that join do so later.

    Args:
        groups: number of bundles by name of the new groups.
        bundle: resources of each.
        actors: number of its bundle by name of the actor.
        preferred: hosts that groups of one bundle get if they are free, the best first: of several bundles
            Ray takes no preference that another node may break.
        request: request of the actors, without their names.

    Raises:
        WanmaError: an actor cannot start.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    targets = find_targets(preferred, bundle, list_nodes()) if preferred else []
    for name, count in groups.items():
        place: dict[str, str] = {"strategy": "STRICT_SPREAD"}
        if count == 1 and targets:
            place = {"strategy": "STRICT_PACK", "_soft_target_node_id": targets.pop(0)}
        ray.util.placement_group([bundle] * count, name=name, lifetime="detached", **place)
    handles = []
    for name, number in actors.items():
        strategy = PlacementGroupSchedulingStrategy(
            ray.util.get_placement_group(name.rpartition("-")[0]), number
        )
        options: dict[str, Any] = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}
        options["resources"] = {key: value for key, value in bundle.items() if key not in ("CPU", "GPU")}
        kind = ray.remote(NodeActor).options(
            name=name, lifetime="detached", scheduling_strategy=strategy, **options
        )
        handles.append(kind.remote(json.dumps({**request, "name": name})))
    if not all(ray.util.get_placement_group(name).wait(GRANT_SECONDS) for name in groups):
        return False
    if request["is_joining"]:
        return True
    try:
        ray.get([handle.rendezvous.remote() for handle in handles], timeout=START_SECONDS)
    except ray.exceptions.RayError as error:
        cause = str(error).strip().splitlines()[-1].removeprefix("RuntimeError: ")
        raise WanmaError(
            cause,
            "each node needs wanma beside its Ray, and must see the folders of the run: use a shared file "
            "system, and --run-dir DIR on it",
        ) from error
    return True


def find_targets(preferred: list[str], bundle: dict[str, float], nodes: list[dict[str, Any]]) -> list[str]:
    """Return the ids of the nodes of preferred hosts that have the resources of a bundle free now."""
    return [
        node["id"]
        for host in preferred
        for node in nodes
        if node["host"] == host and all(node["available"].get(key, 0) >= need for key, need in bundle.items())
    ]


def stop_actors(names: list[str], signals: str) -> None:
    """Send signals to the supervisors of actors that live."""
    import ray

    for name in names:
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            ray.get(ray.get_actor(name).stop.remote(signals), timeout=ANSWER_SECONDS)


OPERATIONS = {
    "connect": connect,
    "nodes": list_nodes,
    "groups": find_groups,
    "actors": find_actors,
    "start": start_nodes,
    "stop": stop_actors,
    "remove": remove_groups,
}


def answer(operation: str, **values: Any) -> dict[str, Any]:
    """Return the value of an operation, or its error."""
    try:
        return {"value": OPERATIONS[operation](**values)}  # type: ignore[operator]
    except WanmaError as error:
        return {"error": error.message, "hint": error.hint}
    except Exception as error:  # whatever Ray raises is told to the user, who asked for it
        return {"error": f"Ray: {type(error).__name__}: {error}", "hint": ""}


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), file=answers, flush=True)
