"""State of a run and the cause of its wait, from messages as the projects write them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from wanma.engines.engine import EngineCluster
from wanma.engines.kubernetes.states import Observation, explain_wait, read_status
from wanma.engines.kubernetes.waiting import find_cause
from wanma.job.cluster import Cluster, NodeGroup


@pytest.fixture
def handle(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "engine").mkdir()
    return {
        "name": "wanma-gpt",
        "kind": "job",
        "jobs": ["wanma-gpt"],
        "min_nodes": 4,
        "requeue_exit_code": 143,
        "run_directory": str(tmp_path),
    }


def first(**conditions: str) -> dict[str, Any]:
    entries = [
        {"type": name, "status": "True", "reason": why, "message": ""} for name, why in conditions.items()
    ]
    return {"metadata": {"name": "wanma-gpt", "labels": {}}, "status": {"conditions": entries}}


def pod(name: str, state: dict[str, Any], phase: str = "Pending", scheduled: str = "") -> dict[str, Any]:
    conditions = [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": scheduled}
    ]
    statuses = [{"name": "wanma", "state": state}]
    status = {"phase": phase, "containerStatuses": statuses, "conditions": conditions if scheduled else []}
    return {"metadata": {"name": name}, "spec": {}, "status": status}


def event(reason: str, message: str, kind: str = "Job", name: str = "wanma-gpt") -> dict[str, Any]:
    about = {"kind": kind, "name": name}
    return {"metadata": {}, "reason": reason, "message": message, "involvedObject": about}


RUNNING = {"running": {}}


def test_a_run_runs_once_enough_pods_do(handle: dict[str, Any]) -> None:
    pods = [pod(f"wanma-gpt-{number}", RUNNING, "Running") for number in range(4)]
    assert read_status(handle, Observation(first(), pods)).state == "running"
    waiting = pod("wanma-gpt-3", {}, scheduled="0/4 nodes are available: 4 Insufficient nvidia.com/gpu.")
    status = read_status(handle, Observation(first(), [*pods[:3], waiting]))
    assert status.state == "pending"
    assert "3 of 4" in status.reason
    assert "nvidia.com/gpu" in status.reason


@pytest.mark.parametrize(
    ("code", "state"), [(1, "failed"), (130, "cancelled")], ids=["failed", "stopped by hand"]
)
def test_an_end_has_the_exit_code_of_a_pod(handle: dict[str, Any], code: int, state: str) -> None:
    pods = [pod("wanma-gpt-0", {"terminated": {"exitCode": code}}, "Failed")]
    status = read_status(handle, Observation(first(Failed="PodFailurePolicy"), pods))
    assert (status.state, status.exit_code) == (state, code)
    assert read_status(handle, Observation(first(Complete="CompletionsReached"))).state == "finished"


def test_a_wait_begins_with_the_submission_a_suspension_or_the_loss_of_a_pod() -> None:
    def ago(seconds: float) -> str:
        return (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat()

    job = first(Suspended="JobSuspended")
    job["metadata"]["creationTimestamp"] = ago(900)
    job["status"]["conditions"][0]["lastTransitionTime"] = ago(600)
    assert Observation(job).waiting_seconds == pytest.approx(600, abs=5)
    lost = pod("wanma-gpt-1", {}) | {"metadata": {"name": "wanma-gpt-1", "creationTimestamp": ago(300)}}
    assert Observation(job, [lost]).waiting_seconds == pytest.approx(300, abs=5)
    job["status"]["conditions"] = []
    assert Observation(job).waiting_seconds == pytest.approx(900, abs=5)


def test_a_run_that_is_gone_was_deleted_unless_wanma_did_it(handle: dict[str, Any]) -> None:
    assert read_status(handle, Observation(None)).reason
    (Path(handle["run_directory"]) / "engine" / "kubernetes-cancelled").write_text("")
    status = read_status(handle, Observation(None))
    assert (status.state, status.reason) == ("cancelled", "")


def workload(kind: str, status: str, reason: str, message: str) -> dict[str, Any]:
    condition = {"type": kind, "status": status, "reason": reason, "message": message}
    return {"metadata": {}, "status": {"conditions": [condition]}}


FLAVORS = "couldn't assign flavors to pod set node: insufficient"


@pytest.mark.parametrize(
    ("pods", "events", "workloads", "meaning", "is_final"),
    [
        (
            [
                pod(
                    "p",
                    {},
                    scheduled="0/2 nodes are available: 2 Insufficient nvidia.com/gpu. preemption: 0/2 nodes",
                )
            ],
            [],
            [],
            "nvidia",
            0,
        ),
        (
            [pod("p", {}, scheduled="1 node(s) had untolerated taint {spot: }")],
            [event("NotTriggerScaleUp", "pod didn't trigger scale-up: 1 max size reached", "Pod", "p")],
            [],
            "autoscaler",
            0,
        ),
        (
            [
                pod(
                    "p",
                    {},
                    scheduled="0/2 nodes are available: 2 Insufficient nvidia.com/gpu. preemption: 0/2 nodes",
                )
            ],
            [event("TriggeredScaleUp", "pod triggered scale-up: [{group 0->1 (max: 4)}]", "Pod", "p")],
            [],
            "awaited",
            0,
        ),
        ([pod("p", {}, scheduled="1 node(s) had untolerated taint {spot: }")], [], [], "spot", 0),
        ([pod("p", {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off"}})], [], [], "image", 1),
        ([], [event("FailedCreate", "pods is forbidden: exceeded quota: team")], [], "ResourceQuota", 0),
        ([], [event("FailedCreate", "maximum cpu usage per Container is 4")], [], "namespace forbids", 1),
        (
            [],
            [],
            [workload("QuotaReserved", "False", "Pending", f"{FLAVORS} unused quota for cpu")],
            "in use",
            0,
        ),
        (
            [],
            [],
            [workload("QuotaReserved", "False", "Inadmissible", "LocalQueue x doesn't exist")],
            "queue",
            1,
        ),
        ([], [], [workload("Evicted", "True", "Preempted", "Preempted to accommodate")], "priority", 0),
    ],
)
def test_each_message_has_its_meaning(
    pods: list[Any], events: list[Any], workloads: list[Any], meaning: str, is_final: int
) -> None:
    cause = find_cause(pods, events, workloads)
    assert cause is not None
    assert meaning in cause.meaning
    assert cause.is_final == bool(is_final)


def test_an_explanation_says_what_would_start_at_once(handle: dict[str, Any]) -> None:
    pods = [pod("wanma-gpt-0", {}, scheduled="0/4 nodes are available: 2 Insufficient nvidia.com/gpu.")]
    nodes = EngineCluster(Cluster((NodeGroup("n", 1, 1, ()),)), 2, 4)
    explanation = explain_wait(handle, Observation(first(), pods), nodes)
    assert "4 nodes" in explanation.summary
    assert any("--nodes 2" in line for line in explanation.advice)
