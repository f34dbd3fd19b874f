"""Reader of TF_CONFIG, which TensorFlow's launchers set: chief and workers are the processes of a launch.

Source: tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/TFConfigClusterResolver. Kubeflow's
TFJob sets it in each of its pods.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from wanma.engines.launchers.launcher_placement import LauncherPlacement
from wanma.job.errors import JobError

_VARIABLE = "TF_CONFIG"
_WORKER_ROLES = ("chief", "master", "worker")
"""Roles that train, in the order of the ranks; 'master' is the older name of the chief."""


def read_tensorflow(environment: Mapping[str, str]) -> LauncherPlacement | None:
    """Read a chief or worker of TF_CONFIG; those at one host are processes of one node.

    Raises:
        JobError: TF_CONFIG is damaged, or this task does not train.
    """
    if not (text := environment.get(_VARIABLE)):
        return None
    try:
        config = json.loads(text)
        if not config.get("cluster"):
            return None  # TensorFlow on one machine
        cluster = {role: [str(one) for one in addresses] for role, addresses in config["cluster"].items()}
        role, index = config["task"]["type"], int(config["task"]["index"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise JobError(
            f"the variable {_VARIABLE} names no task of a cluster: {type(error).__name__}: {error}",
            f"unset it if no launcher has set it: `env -u {_VARIABLE} wanma ...`",
        ) from None
    tasks = [(name, number) for name in _WORKER_ROLES for number in range(len(cluster.get(name, ())))]
    if (role, index) not in tasks:
        servers = len(cluster.get("ps", ()))
        raise JobError(
            f"{_VARIABLE} makes this process {role} {index}, and only a chief and workers train",
            f"start no {role}: parameter servers run beside the workers, with servers.count = "
            f"{max(servers, 1)} in the job, and the first worker validates",
        )
    hosts = [cluster[name][number].rpartition(":")[0] for name, number in tasks]
    rank = tasks.index((role, index))
    nodes = list(dict.fromkeys(hosts))
    return LauncherPlacement(
        launcher=f"the launcher that set {_VARIABLE}",
        rank=rank,
        world_size=len(tasks),
        local_rank=hosts[:rank].count(hosts[rank]),
        local_world_size=hosts.count(hosts[rank]),
        nodes=len(nodes),
        node_rank=nodes.index(hosts[rank]),
        host=nodes[0].strip("[]"),
        variables=(_VARIABLE,),
        process_variables=(_VARIABLE,),
    )
