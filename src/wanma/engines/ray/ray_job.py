"""Texts for others that submit a run to Ray: `ray job submit`, and a RayJob of KubeRay."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

from wanma.engines.engine import Submission

RAY_PORT = 6379
"""Port of the head node of the cluster that KubeRay makes."""
_JOB_FOLDER = "/etc/wanma"


def render_ray_job(submission: Submission) -> str:
    """Return the command that submits a run by `ray job submit`, and the RayJob if its image is set.

    The RayJob's cluster has one pod for each node of the run, and a head that runs no part of it; its entrypoint
    submits the run to this cluster, shows it, and has its exit code.
    """
    settings = submission.settings.ray
    words = ["python", "-P", "-m", "wanma", *submission.command]
    command = ["ray", "job", "submit", "--address", "http://HEAD:8265", "--", *words]
    head = f"# {submission.nodes} nodes, each with {_resource_text(submission)}, in a placement group (STRICT_SPREAD)\n"
    head += f"# on a machine outside of the cluster: {shlex.join(command)}\n"
    if settings.image is None:
        return head + "# cluster.ray.image, and cluster.ray.volume, give the RayJob of KubeRay\n"
    name = re.sub(r"[^a-z0-9-]+", "-", submission.name.lower()).strip("-")[:40] or "wanma"
    words[words.index(str(submission.command[1]))] = f"{_JOB_FOLDER}/job.toml"
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-job"},
        "data": {"job.toml": submission.job_text},
    }
    ray_job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name},
        "spec": {
            "entrypoint": f"cd {shlex.quote(str(submission.folder))} && {shlex.join(words)}",
            "shutdownAfterJobFinishes": True,
            "backoffLimit": 0,
            "rayClusterSpec": {
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0"},
                    "template": _pod(submission, name, "ray-head", {"cpu": 2, "memory": "4Gi"}),
                },
                "workerGroupSpecs": [
                    {
                        "groupName": "nodes",
                        "replicas": submission.nodes,
                        "minReplicas": submission.min_nodes,
                        "maxReplicas": submission.nodes,
                        "rayStartParams": {"num-cpus": f"{submission.cores_per_node}"},
                        "template": _pod(submission, name, "ray-worker", _limits(submission)),
                    }
                ],
            },
        },
    }
    # Each document is JSON, which is YAML, too.
    return head + "---\n" + "\n---\n".join(_yaml(value) for value in (config_map, ray_job)) + "\n"


def _resource_text(submission: Submission) -> str:
    gpus = f" and {submission.gpus_per_node} GPU" if submission.gpus_per_node else ""
    return f"{submission.cores_per_node} CPU{gpus}"


def _limits(submission: Submission) -> dict[str, Any]:
    gpus = {"nvidia.com/gpu": submission.gpus_per_node} if submission.gpus_per_node else {}
    return {"cpu": submission.cores_per_node, **gpus}


def _pod(submission: Submission, name: str, container: str, limits: dict[str, Any]) -> dict[str, Any]:
    """Return the template of a pod; the shared folder is mounted where the working directory is here."""
    volumes: list[dict[str, Any]] = [
        {"name": "job", "configMap": {"name": f"{name}-job"}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    mounts = [{"name": "job", "mountPath": _JOB_FOLDER}, {"name": "shm", "mountPath": "/dev/shm"}]
    if (claim := submission.settings.ray.volume) is not None:
        volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": "shared", "mountPath": str(submission.folder)})
    return {
        "spec": {
            "containers": [
                {
                    "name": container,
                    "image": submission.settings.ray.image,
                    "resources": {"limits": limits, "requests": limits},
                    "volumeMounts": mounts,
                }
            ],
            "volumes": volumes,
        }
    }


def _yaml(value: Any, indent: str = "") -> str:
    """Return a value as YAML: texts are JSON's, which are YAML's, too; lines of a long text stay readable."""
    if isinstance(value, dict) and value:
        lines = []
        for key, item in value.items():
            name = key if re.fullmatch(r"[A-Za-z][\w-]*", key) else json.dumps(key)
            if isinstance(item, str) and "\n" in item:
                text = "\n".join(f"{indent}  {line}".rstrip() for line in item.splitlines())
                lines.append(f"{indent}{name}: |\n{text}")
            elif isinstance(item, (dict, list)) and item:
                lines.append(f"{indent}{name}:\n{_yaml(item, indent + '  ')}")
            else:
                lines.append(f"{indent}{name}: {json.dumps(item)}")
        return "\n".join(lines)
    if isinstance(value, list) and value:
        return "\n".join(f"{indent}- {_yaml(item, indent + '  ').lstrip()}" for item in value)
    return f"{indent}{json.dumps(value)}"
