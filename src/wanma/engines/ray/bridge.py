"""Program that asks Ray for an engine: a JSON object a line on standard input, and an answer a line.

    python -P -m wanma.engines.ray.bridge

It connects with the first question, and ends with its standard input. What Ray prints goes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
from typing import Any, TextIO

from wanma.engines.ray.placements import (
    NAMESPACE,
    find_actors,
    find_groups,
    remove_actor,
    remove_group,
    remove_run,
)
from wanma.job.errors import WanmaError

CONNECT_SECONDS = 5.0
GRANT_SECONDS = 2
"""Time, in whole seconds, in which Ray grants a placement group for which nodes are free."""
START_SECONDS = 60.0
"""Time, in seconds, that an actor may take to start."""


def connect(address: str) -> str:
    """Connect to the Ray cluster; return the address of its head node.

    Raises:
        WanmaError: there is none, or it has another version of Ray or Python.
    """
    import ray

    hint = (
        "start it with `ray start`, or correct cluster.ray.address; on a node of the cluster 'auto' finds it"
    )
    host, _, port = address.rpartition(":")
    if host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        except (OSError, ValueError) as error:
            raise WanmaError(f"no Ray cluster answers at {address}: {error}", hint) from error
    try:
        context = ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise explain_refusal(str(error), address, hint) from error
    return str(context.address_info["gcs_address"])


def explain_refusal(text: str, address: str, hint: str) -> WanmaError:
    """Return Ray's refusal of a connection with its meaning and the way out."""
    versions = re.findall(r"Ray: (\S+)\s+Python: (\S+)", text)
    if len(versions) == 2:
        (ray_there, python_there), (ray_here, python_here) = versions
        return WanmaError(
            f"the Ray cluster has Ray {ray_there} with Python {python_there}, and this is Ray {ray_here} with "
            f"Python {python_here}",
            f"install ray=={ray_there} in an environment with Python {python_there}",
        )
    if "Could not find any running Ray instance" in text:
        return WanmaError("there is no Ray cluster on this machine", hint)
    return WanmaError(f"Ray refuses the connection to {address}: {text.strip().splitlines()[-1]}", hint)


def list_nodes() -> list[dict[str, Any]]:
    """Return the nodes that live: `host`, `resources` in all, and those that are `available` now."""
    import ray
    from ray._private.state import available_resources_per_node  # a public one exists only by the dashboard

    free = available_resources_per_node()
    return [
        {
            "id": node["NodeID"],
            "host": node["NodeManagerHostname"],
            "address": node["NodeManagerAddress"],
            "resources": node["Resources"],
            "available": free.get(node["NodeID"], {}),
        }
        for node in ray.nodes()
        if node["Alive"]
    ]


def read_state(prefix: str = "") -> dict[str, Any]:
    """Return placement groups and actors of a run, or of all runs."""
    return {"groups": find_groups(prefix), "actors": find_actors(prefix)}


def start_nodes(
    groups: dict[str, int], bundle: dict[str, float], actors: dict[str, Any], requests: dict[str, Any]
) -> dict[str, Any]:
    """Create placement groups, and actors in bundles; return the reports of actors whose nodes were free.

    Args:
        groups: number of bundles by name of the new groups.
        bundle: resources of each.
        actors: group and number of its bundle, by name of the actor.
        requests: request of each actor, by its name.

    Raises:
        WanmaError: an actor cannot start.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from wanma.engines.ray.node_actor import NodeActor

    made = {
        name: ray.util.placement_group([bundle] * count, "STRICT_SPREAD", name=name, lifetime="detached")
        for name, count in groups.items()
    }
    kind, others = (
        ray.remote(NodeActor),
        {name: value for name, value in bundle.items() if name not in ("CPU", "GPU")},
    )
    handles = {}
    for name, (group, number) in actors.items():
        place = made.get(group) or ray.util.get_placement_group(group)
        handles[name] = (
            group,
            kind.options(
                name=name,
                lifetime="detached",
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                resources=others or None,
                scheduling_strategy=PlacementGroupSchedulingStrategy(place, number),
            ).remote(json.dumps(requests[name])),
        )
    granted = {name for name, group in made.items() if group.wait(GRANT_SECONDS)}
    waited = {name: handle.report.remote() for name, (group, handle) in handles.items() if group in granted}
    try:
        return {name: json.loads(ray.get(value, timeout=START_SECONDS)) for name, value in waited.items()}
    except ray.exceptions.RayError as error:
        cause = str(error).strip().splitlines()[-1]
        raise WanmaError(
            f"Ray cannot start an actor of the run: {cause}",
            "each node of the Ray cluster needs wanma in the environment of `ray start`",
        ) from error


def stop_actors(names: list[str], signals: str) -> None:
    """Send signals to the supervisors of actors that live."""
    import ray

    for name in names:
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            ray.get(ray.get_actor(name).stop.remote(signals), timeout=CONNECT_SECONDS)


def remove_groups(names: list[str]) -> None:
    """Remove placement groups with their actors."""
    for name in names:
        for actor in find_actors(f"{name}-"):
            remove_actor(actor)
        remove_group(name)


OPERATIONS = {
    "connect": connect,
    "nodes": list_nodes,
    "state": read_state,
    "start": start_nodes,
    "stop": stop_actors,
    "remove": remove_run,
    "remove_groups": remove_groups,
}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the value of an operation, or its error."""
    operation = OPERATIONS[request.pop("operation")]
    try:
        return {"value": operation(**request)}
    except WanmaError as error:
        return {"error": error.message, "hint": error.hint}
    except Exception as error:  # whatever Ray raises is told to the user, who asked for it
        return {"error": f"Ray: {type(error).__name__}: {error}", "hint": ""}


def main(answers: TextIO) -> None:
    """Answer one line after another."""
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the command that asks
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(own)
