"""Cluster of the tests: the stand-in, or a real one that KUBECONFIG and WANMA_TEST_IMAGE name."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.kubernetes.cluster import IMAGE, KubernetesCluster, node
from wanma.api.engines.control import fetch_records, run_status
from wanma.engines.engine import RunStatus
from wanma.engines.kubernetes.client import KubernetesClient
from wanma.engines.kubernetes.manifests import MANAGER_LABEL
from wanma.job.file.loading import to_job
from wanma.job.run.run_directory import RunDirectory
from wanma.job.sections.job import Job

DEADLINE_SECONDS = 150.0
TEXT = "the horses of the tests run through the long text " * 200


@dataclass
class Site:
    """Working directory, and the cluster that its runs go to."""

    folder: Path
    image: str
    stand_in: KubernetesCluster | None
    """The stand-in; None: the cluster is real."""

    @property
    def cluster(self) -> KubernetesCluster:
        """The stand-in, for a test that changes the cluster as its administrator does."""
        if self.stand_in is None:
            pytest.skip("changes the cluster as its administrator: needs the stand-in")
        return self.stand_in

    def job(
        self,
        *,
        steps: int = 4,
        nodes: int | str = 2,
        cluster: dict[str, Any] | None = None,
        **kubernetes: Any,
    ) -> Job:
        place = {} if "store" in kubernetes else {"volume": "runs"}
        settings = {"image": self.image, "python": "python", **place, **kubernetes}
        return to_job(
            {
                "model": {"preset": "gpt-1m"},
                "data": {"text": ["text.txt"], "sequence_length": 32},
                "train": {"steps": steps, "global_batch": 4},
                "parallel": {"dp_shard": 2},
                "checkpoint": {"every_steps": 4},
                "cluster": {
                    "engine": "kubernetes",
                    "nodes": nodes,
                    "device": "cpu",
                    "threads_per_rank": 1,
                    "last_call_timeout_seconds": 1,
                    **(cluster or {}),
                    "kubernetes": settings,
                },
                "observe": {"name": "gpt", "console": "plain"},
            }
        )

    @property
    def client(self) -> KubernetesClient:
        return KubernetesClient()

    def objects(self) -> list[str]:
        """Return what is left on the cluster of all runs, by label."""
        kinds = ("JobSet", "Job", "Pod", "Secret", "Service", "PodGroup")
        return [
            f"{kind} {found['metadata']['name']}"
            for kind in kinds
            if self.client.has_kind(kind)
            for found in self.client.list(kind, f"{MANAGER_LABEL}=wanma")
        ]

    def wait(self, condition: Callable[[], Any], subject: str) -> Any:
        """Return the first true value of a condition."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (value := condition()):
            if time.monotonic() > deadline:
                state = self.stand_in.describe() if self.stand_in is not None else ""
                raise AssertionError(f"no {subject} after {DEADLINE_SECONDS:.0f} s\n{state}")
            time.sleep(0.1)
        return value

    def wait_for_state(self, run: RunDirectory, *states: str) -> RunStatus:
        status: RunStatus = self.wait(
            lambda: status if (status := run_status(run)).state in states else None, f"state {states}"
        )
        return status

    def wait_for_step(self, run: RunDirectory, step: int) -> None:
        def has_step() -> bool:
            fetch_records(run)
            return bool(losses(run)) and max(losses(run)) >= step

        self.wait(has_step, f"step {step}")


def losses(run: RunDirectory) -> dict[int, float]:
    """Return the losses by step; a step that was recorded twice is an error."""
    found: dict[int, float] = {}
    for line in run.metrics.read_text().splitlines() if run.metrics.exists() else []:
        entry = json.loads(line)
        assert entry["step"] not in found, f"step {entry['step']} was recorded twice"
        found[entry["step"]] = entry["loss"]
    return found


@pytest.fixture
def nodes() -> list[dict[str, Any]]:
    """Nodes of the stand-in."""
    return [node("a"), node("b")]


@pytest.fixture
def extensions() -> tuple[str, ...] | None:
    """API groups of the stand-in; None: all."""
    return None


@pytest.fixture
def site(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nodes: list[dict[str, Any]],
    extensions: tuple[str, ...] | None,
) -> Iterator[Site]:
    """A working directory with a text, and a cluster with the claim 'runs'."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "text.txt").write_text(TEXT)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if image := os.environ.get("WANMA_TEST_IMAGE"):
        if extensions is not None:
            pytest.skip("needs a cluster of other kinds")
        yield Site(folder, image, None)
        return
    (tmp_path / "cluster").mkdir()
    options = {} if extensions is None else {"extensions": extensions}
    with KubernetesCluster(tmp_path / "cluster", nodes, **options) as cluster:
        claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
        cluster.add("persistentvolumeclaims", {"metadata": {"name": "runs"}, "spec": claim}, "default")
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        yield Site(folder, IMAGE, cluster)
