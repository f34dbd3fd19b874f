"""Text of a submission to Ray: its placement group, and `ray job submit` or a RayJob of KubeRay for it."""

from __future__ import annotations

import re
import shlex
from typing import Any

from wanma.engines.engine import Submission

_JOB_FOLDER = "/etc/wanma"
_HEAD_LIMITS = {"cpu": 2, "memory": "4Gi"}


def render_ray_job(submission: Submission) -> str:
    """Return the command that submits a run from outside, and its RayJob where image and volume are set.

    The cluster of the RayJob has a pod for each node of the run, and a head that has no part in it. Its
    entrypoint submits the run to this cluster, shows it, and has its exit code.
    """
    import yaml

    settings = submission.settings.ray
    gpus = {"nvidia.com/gpu": submission.gpus_per_node} if submission.gpus_per_node else {}
    limits = {"cpu": submission.cores_per_node, **gpus}
    outside = ["ray", "job", "submit", "--address", "http://HEAD:8265", "--", "sh", "-c"]
    text = f"# placement group (STRICT_SPREAD) of {submission.nodes} × {limits}\n"
    text += f"# from outside of the cluster: {shlex.join([*outside, _command(submission, 'JOB')])}\n"
    if settings.image is None or settings.volume is None:
        return f"{text}# cluster.ray.image and cluster.ray.volume give the RayJob of KubeRay\n"
    name = re.sub(r"[^a-z0-9-]+", "-", submission.name.lower()).strip("-")[:40] or "wanma"
    config_map = {"name": f"{name}-job"}
    workers = {
        "groupName": "nodes",
        "replicas": submission.nodes,
        "minReplicas": submission.min_nodes,
        "maxReplicas": submission.nodes,
        "rayStartParams": {},
        "template": _pod(submission, config_map, limits),
    }
    head = {"rayStartParams": {"num-cpus": "0"}, "template": _pod(submission, config_map, _HEAD_LIMITS)}
    spec = {
        "entrypoint": _command(submission, f"{_JOB_FOLDER}/job.toml"),
        "shutdownAfterJobFinishes": True,
        "rayClusterSpec": {"headGroupSpec": head, "workerGroupSpecs": [workers]},
    }
    data = {"job.toml": submission.job_text}
    documents = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": config_map, "data": data},
        {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": name}, "spec": spec},
    ]
    return f"{text}---\n{yaml.safe_dump_all(documents, sort_keys=False)}"


def _command(submission: Submission, job: str) -> str:
    """Return the shell command that submits the run within the cluster."""
    if submission.job_text:
        words = ["train", job, *submission.command[2:], "cluster.ray.address=auto"]
    else:
        words = ["launch", "--engine", "ray", "--nodes", str(submission.nodes), *submission.command[1:]]
    return shlex.join(["cd", str(submission.folder)]) + " && " + shlex.join(["python", "-m", "wanma", *words])


def _pod(submission: Submission, config_map: dict[str, str], limits: dict[str, Any]) -> dict[str, Any]:
    """Return the template of a pod; the shared folder is mounted where the working directory is here."""
    claim = {"claimName": submission.settings.ray.volume}
    volumes = {
        _JOB_FOLDER: {"name": "job", "configMap": config_map},
        "/dev/shm": {"name": "shm", "emptyDir": {"medium": "Memory"}},
        str(submission.folder): {"name": "shared", "persistentVolumeClaim": claim},
    }
    container = {
        "name": "ray",
        "image": submission.settings.ray.image,
        "resources": {"limits": limits, "requests": limits},
        "volumeMounts": [{"name": volume["name"], "mountPath": path} for path, volume in volumes.items()],
    }
    return {"spec": {"containers": [container], "volumes": list(volumes.values())}}
