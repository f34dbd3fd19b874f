"""Texts for others that submit a run to Ray: `ray job submit`, and a RayJob of KubeRay."""

from __future__ import annotations

import re
import shlex
from typing import Any

from wanma.engines.engine import Submission

_JOB_FOLDER = "/etc/wanma"


def render_ray_job(submission: Submission) -> str:
    """Return the command that submits a run from outside of the cluster, and the RayJob if its image is set.

    The cluster of the RayJob has a pod for each node of the run, and a head that has no part in it. Its
    entrypoint submits the run to this cluster, shows it, and has its exit code.
    """
    import yaml

    words = ["python", "-P", "-m", "wanma", *submission.command]
    command = shlex.join(["ray", "job", "submit", "--address", "http://HEAD:8265", "--", *words])
    limits: dict[str, Any] = {"cpu": submission.cores_per_node}
    if submission.gpus_per_node:
        limits["nvidia.com/gpu"] = submission.gpus_per_node
    text = f"# placement group (STRICT_SPREAD) of {submission.nodes} × {limits}\n# from outside: {command}\n"
    if submission.settings.ray.image is None:
        return f"{text}# cluster.ray.image and cluster.ray.volume give the RayJob of KubeRay\n"
    name = re.sub(r"[^a-z0-9-]+", "-", submission.name.lower()).strip("-")[:40] or "wanma"
    words[words.index(submission.command[1])] = f"{_JOB_FOLDER}/job.toml"
    workers = {
        "groupName": "nodes",
        "replicas": submission.nodes,
        "minReplicas": submission.min_nodes,
        "maxReplicas": submission.nodes,
        "rayStartParams": {},
        "template": _pod(submission, name, limits),
    }
    head = {
        "rayStartParams": {"num-cpus": "0"},
        "template": _pod(submission, name, {"cpu": 2, "memory": "4Gi"}),
    }
    ray_job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name},
        "spec": {
            "entrypoint": f"cd {shlex.quote(str(submission.folder))} && {shlex.join(words)}",
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {"headGroupSpec": head, "workerGroupSpecs": [workers]},
        },
    }
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-job"},
        "data": {"job.toml": submission.job_text},
    }
    return f"{text}---\n{yaml.safe_dump_all([config_map, ray_job], sort_keys=False)}"


def _pod(submission: Submission, name: str, limits: dict[str, Any]) -> dict[str, Any]:
    """Return the template of a pod; the shared folder is mounted where the working directory is here."""
    volumes = {
        _JOB_FOLDER: {"name": "job", "configMap": {"name": f"{name}-job"}},
        "/dev/shm": {"name": "shm", "emptyDir": {"medium": "Memory"}},
    }
    if (claim := submission.settings.ray.volume) is not None:
        volumes[str(submission.folder)] = {"name": "shared", "persistentVolumeClaim": {"claimName": claim}}
    container = {
        "name": "ray",
        "image": submission.settings.ray.image,
        "resources": {"limits": limits, "requests": limits},
        "volumeMounts": [{"name": volume["name"], "mountPath": path} for path, volume in volumes.items()],
    }
    return {"spec": {"containers": [container], "volumes": list(volumes.values())}}
