"""Place of a benchmark: hardware of this machine, versions, and the code that is measured."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

import wanma
from wanma.engines.code.git import NoRepositoryError, repository_root, run_git
from wanma.hardware.discovery.node import discover_node
from wanma.job.errors import WanmaError
from wanma.job.run.resource_limits import cpu_model
from wanma.job.run.run_directory import RunDirectory

PACKAGES = (
    "wanma",
    "torch",
    "numpy",
    "transformers",
    "accelerate",
    "lightning",
    "deepspeed",
    "tensorflow",
    "tensorflow-cpu",
    "jax",
)
"""Packages whose versions a result shows, if they are installed."""


def describe_environment() -> dict[str, str]:
    """Return versions by package, of those that are installed."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def describe_hardware(runs: Iterable[RunDirectory] = ()) -> dict[str, Any]:
    """Return the hardware: the nodes for which a run was planned, else this one.

    Args:
        runs: runs of the benchmark; the first that has a plan names the nodes.
    """
    cluster = next((found for run in runs if (found := _planned_cluster(run)) is not None), None)
    return {
        "cluster": cluster or discover_node().to_json(),
        "processor": cpu_model(),
        "cores": len(psutil.Process().cpu_affinity()),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
    }


def hardware_identity(hardware: Mapping[str, Any]) -> dict[str, str]:
    """Return the parts of the hardware that must agree for two results to be comparable, as texts by name.

    Memory is in whole GiB; hosts and kernel are left out.
    """
    identity = {}
    if cluster := hardware.get("cluster"):
        identity["cluster"] = " + ".join(map(_node_text, cluster["nodes"]))
    if hardware.get("processor") is not None:
        identity["processor"] = str(hardware["processor"])
    if hardware.get("cores") is not None:
        identity["cores"] = f"{hardware['cores']} cores"
    if hardware.get("memory_bytes") is not None:
        identity["memory"] = f"{hardware['memory_bytes'] / (1 << 30):.0f} GiB"
    return identity


def _node_text(node: Mapping[str, Any]) -> str:
    """Return the devices, or cores, of a node group; unknown keys are ignored, unlike by `Cluster`."""
    names = Counter(device["name"] for device in node.get("devices", ()))
    devices = " and ".join(f"{count} × {name}" for name, count in names.items())
    cpu = (node.get("cpu") or {}).get("name", "")
    content = devices or f"{node['cores']} cores {cpu}".strip()
    return f"{node.get('count', 1)} × ({content})"


def _planned_cluster(run: RunDirectory) -> Mapping[str, Any] | None:
    try:
        return dict(json.loads(run.plan.read_text())["cluster"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def describe_code() -> dict[str, Any]:
    """Return commit of the sources of wanma, whether they differ from it, and their hash."""
    package = Path(wanma.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if not path.is_file() or "__pycache__" in path.parts:
            continue
        digest.update(f"{path.relative_to(package)}\0".encode())
        digest.update(path.read_bytes())
    commit, is_dirty = None, None
    try:
        root = repository_root(package)
        commit = run_git(root, "rev-parse", "HEAD").text.decode().strip()
        changes = run_git(root, "status", "--porcelain", "--", str(package)).text
        is_dirty = bool(changes.strip())
    except (NoRepositoryError, WanmaError):
        pass  # an installed wheel: the hash says which code it is
    return {"commit": commit, "is_dirty": is_dirty, "hash": digest.hexdigest()[:16]}
