"""State of a run, and the explanation of its wait, as pure functions of the objects of the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from wanma.engines.engine import EngineCluster, Explanation, Handle, RunState, RunStatus
from wanma.engines.kubernetes.manifests import CONTAINER, QUEUE_LABEL, Manifest
from wanma.engines.kubernetes.volume import is_ready
from wanma.engines.kubernetes.waiting import find_cause
from wanma.job.errors import EXIT_INTERRUPTED
from wanma.job.run.run_directory import RunDirectory
from wanma.observe.units import count_text
from wanma.report.run_report import read_report
from wanma.report.script_run import read_script_run

CANCEL_FILE = "kubernetes-cancelled"
"""File in the folder of the submission: wanma has deleted the run's objects; its text is the reason."""


@dataclass(frozen=True)
class Observation:
    """Objects of a run at one time."""

    first: Manifest | None
    """JobSet or Job that the run was started by; None: it is gone."""
    pods: Sequence[Manifest] = ()
    events: Sequence[Manifest] = ()
    """Events of the run's objects; only read while it waits."""
    workloads: Sequence[Manifest] = ()
    gangs: Sequence[Manifest] = ()
    """PodGroups of Volcano."""

    @property
    def waiting_seconds(self) -> float:
        """Time, in seconds, since the newest wait began: submission, suspension, or loss of a pod."""
        if self.first is None:
            return 0.0
        waiting = [pod for pod in self.pods if pod.get("status", {}).get("phase") == "Pending"]
        begun = [entry["metadata"]["creationTimestamp"] for entry in (self.first, *waiting)]
        if "Suspended" in (conditions := true_conditions(self.first)):
            begun.append(conditions["Suspended"]["lastTransitionTime"])
        newest = max(datetime.fromisoformat(time) for time in begun)
        return (datetime.now(UTC) - newest).total_seconds()


def mark_cancelled(handle: Handle, reason: str) -> None:
    """Record that wanma deletes the run's objects, before it does."""
    marker = RunDirectory(Path(handle["run_directory"])).engine_files / CANCEL_FILE
    marker.write_text(reason, encoding="utf-8")


def pod_names(pods: Sequence[Manifest]) -> tuple[str, ...]:
    """Return the host names of pods, in order."""
    named = {pod["spec"].get("hostname") or pod["metadata"]["name"] for pod in pods}
    return tuple(sorted(named, key=lambda name: (len(name), name)))


def true_conditions(manifest: Manifest) -> dict[str, Manifest]:
    """Return the conditions of an object that hold, by type."""
    conditions = manifest.get("status", {}).get("conditions", [])
    return {entry["type"]: entry for entry in conditions if entry["status"] == "True"}


def read_status(handle: Handle, found: Observation) -> RunStatus:
    """Return the state of a run.

    It runs as soon as so many pods run, or have finished, as it needs at least.
    """
    ids = tuple(f"{handle['kind']}/{name}" for name in handle["jobs"])
    if found.first is None:
        return _status_after_deletion(handle, ids)
    conditions = true_conditions(found.first)
    if "Complete" in conditions or "Completed" in conditions:
        return RunStatus("finished", 0, "", (), ids)
    if "Failed" in conditions:
        return _failed_status(handle, found, conditions["Failed"], ids)
    running = [pod for pod in found.pods if is_ready(pod)]
    if "deletionTimestamp" in found.first["metadata"]:
        leaving = [pod for pod in found.pods if pod.get("status", {}).get("phase") == "Running"]
        return RunStatus("running", None, "it saves and ends", pod_names(leaving), ids)
    done = [pod for pod in found.pods if pod.get("status", {}).get("phase") == "Succeeded"]
    if running and len(running) + len(done) >= int(handle["min_nodes"]):
        return RunStatus("running", None, "", pod_names(running), ids)
    cause = find_cause(found.pods, found.events, found.workloads, found.gangs)
    reason = f"{cause.meaning}: {cause.message}" if cause is not None else ""
    if running:
        reason = f"{len(running)} of {count_text(int(handle['min_nodes']), 'pod')} run; {reason}".rstrip("; ")
    return RunStatus("pending", None, reason, (), ids)


def _failed_status(
    handle: Handle, found: Observation, condition: Manifest, ids: tuple[str, ...]
) -> RunStatus:
    codes = [
        int(entry["state"]["terminated"]["exitCode"])
        for pod in found.pods
        for entry in pod.get("status", {}).get("containerStatuses", [])
        if entry["name"] == CONTAINER and "terminated" in entry.get("state", {})
    ]
    code = next((code for code in codes if code not in (0, handle["requeue_exit_code"])), None)
    if code == EXIT_INTERRUPTED:
        return RunStatus("cancelled", code, "", (), ids)
    reason = f"{handle['kind']} {handle['name']}: {condition.get('reason')}: {condition.get('message', '')}"
    return RunStatus("failed", code, reason, (), ids)


def _status_after_deletion(handle: Handle, ids: tuple[str, ...]) -> RunStatus:
    """Return the state of a run whose objects are gone: by wanma, by another hand, or by age."""
    run = RunDirectory(Path(handle["run_directory"]))
    marker = run.engine_files / CANCEL_FILE
    if marker.exists():
        reason = marker.read_text(encoding="utf-8")
        return RunStatus("failed" if reason else "cancelled", None, reason, (), ids)
    script = read_script_run(run)
    recorded = script.state if script is not None else ""
    if run.job.exists():
        recorded = read_report(run, tail_only=True).state
    state: RunState = "finished" if recorded == "finished" else "cancelled"
    reason = "" if state == "finished" else f"{ids[0]} was deleted by another hand: not by wanma"
    return RunStatus(state, 0 if state == "finished" else None, reason, (), ids)


def explain_wait(handle: Handle, found: Observation, nodes: EngineCluster | None = None) -> Explanation:
    """Explain why a run waits, and what would start at once.

    Args:
        handle: handle of the run.
        found: its objects.
        nodes: nodes of the cluster; None: unknown.
    """
    wanted = int(handle["min_nodes"])
    running = sum(is_ready(pod) for pod in found.pods)
    head = f"{handle['kind']} {handle['name']} waits for {count_text(wanted, 'node')}"
    if running:
        head = f"{handle['kind']} {handle['name']} has {running} of {count_text(wanted, 'node')}, which wait"
    cause = find_cause(found.pods, found.events, found.workloads, found.gangs)
    if cause is None:
        text = "Kubernetes has given no reason yet"
        if (
            found.first is not None
            and QUEUE_LABEL in found.first["metadata"]["labels"]
            and not found.workloads
        ):
            text = "Kueue has not seen it: is Kueue installed, and does it manage this kind?"
        return Explanation(f"{head}: {text}")
    advice = [cause.way_out] if cause.way_out else []
    if nodes is not None:
        advice.append(f"{nodes.free_nodes} of {nodes.max_nodes} usable nodes are free now")
        advice += nodes.notes
        if 0 < nodes.free_nodes < wanted:
            advice.append(
                f"with {count_text(nodes.free_nodes, 'node')} it could start at once: cancel it, and give "
                f"--nodes {nodes.free_nodes}"
            )
        if nodes.max_nodes < wanted:
            advice.append(
                f"with more than {count_text(nodes.max_nodes, 'node')} it never starts as things stand"
            )
    return Explanation(f"{head}: {cause.meaning} (Kubernetes: {cause.message})", tuple(advice))
