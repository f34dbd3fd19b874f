"""Causes for which a run waits or cannot start, from conditions and events, in plain words.

Messages: kube-scheduler and kubelet (kubernetes.io/docs/tasks/debug/debug-application/debug-pods), Kueue
(kueue.sigs.k8s.io/docs/tasks/troubleshooting), Volcano (volcano-sh/volcano pkg/scheduler/cache/cache.go and
plugins/proportion), cluster-autoscaler (its FAQ), Karpenter (karpenter.sh).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from wanma.engines.kubernetes.manifests import Manifest


@dataclass(frozen=True)
class Cause:
    """Cause of a wait."""

    meaning: str
    """The cause in words."""
    way_out: str
    message: str
    """Message of Kubernetes."""
    is_final: bool
    """True if waiting alone does not help."""


FINAL_CAUSES: tuple[tuple[str, str, str], ...] = (
    (
        r"ErrImagePull|ImagePullBackOff|InvalidImageName|ErrImageNeverPull",
        "the image cannot be pulled",
        "correct cluster.kubernetes.image, or set image_pull_secrets for its registry",
    ),
    (
        r"CreateContainer(Config)?Error|secret \S+ not found|serviceaccount .* not found|no PriorityClass",
        "a name of the job does not exist in the namespace",
        "correct secret_environment, service_account or priority_class of cluster.kubernetes",
    ),
    (
        r"persistentvolumeclaim \S+ not found|unbound immediate|FailedMount|FailedAttachVolume|Multi-Attach",
        "the volume cannot be mounted",
        "check the claim cluster.kubernetes.volume: it must be bound, and ReadWriteMany for several nodes",
    ),
    (
        r"(maximum|minimum|limit).* usage per|must specify|violates PodSecurity",
        "the namespace forbids pods of this form",
        "set cpu, memory or run_as_user of cluster.kubernetes; see `kubectl describe limitrange,quota`",
    ),
    (
        r"Queue .* (doesn't exist|is inactive|is stopped)",
        "Kueue has no such queue in this namespace, or it is stopped",
        "correct cluster.kubernetes.queue; `kubectl get localqueues` lists them",
    ),
    (
        r"queue \S+ (not found|does not exist)|queue .* (Closed|not open)",
        "Volcano has no such queue, or it is closed",
        "correct cluster.kubernetes.queue; `kubectl get queues.scheduling.volcano.sh` lists them",
    ),
    (
        r"maximum capacity|unavailable in ClusterQueue|namespace doesn't match",
        "the queue of Kueue can never give so much",
        "use fewer nodes, or another queue: `kubectl describe clusterqueue` shows its quota",
    ),
)
GANG_MESSAGE = "tasks in gang unschedulable"
PASSING_CAUSES: tuple[tuple[str, str, str], ...] = (
    (
        r"exceeded quota",
        "the ResourceQuota of the namespace has no room",
        "wait for other runs, or use fewer nodes; `kubectl describe quota` shows what is used",
    ),
    (
        r"Preempted|Evicted",
        "Kueue has taken the nodes for a workload of higher priority",
        "it resumes from its checkpoint when there is room again",
    ),
    (
        r"insufficient unused quota|^Pending: ",
        "the quota of the queue of Kueue is in use",
        "it starts when others end; fewer nodes may start sooner",
    ),
    (
        r"queue resource quota insufficient",
        "the capability of the queue of Volcano is in use",
        "it starts when others end; fewer nodes may start sooner",
    ),
    (r"TriggeredScaleUp: |Nominated: ", "new nodes are asked of the autoscaler, and awaited", ""),
    (
        r"NotTriggerScaleUp|no (nodepool|instance type)|incompatible with (nodepool|provisioner)",
        "the autoscaler has no kind of nodes that fits",
        "correct node_selector, tolerations or gpu_resource of cluster.kubernetes",
    ),
    (r"Insufficient ([^\s,]+)", "too few nodes have that much free: {0}", ""),
    (
        r"untolerated taint\(?s?\)? ?\{([^:}]+)",
        "nodes have a taint that the pods do not tolerate: {0}",
        "add it to cluster.kubernetes.tolerations if your runs may use these nodes",
    ),
    (
        r"node\(s\) didn't match",
        "no node has the labels",
        "correct cluster.kubernetes.node_selector or gpu_product; see `kubectl get nodes --show-labels`",
    ),
    (r"node\(s\) were unschedulable|not-ready|no nodes available", "the nodes are cordoned or not ready", ""),
    (GANG_MESSAGE, "no room for all of its pods", ""),
)
"""Pattern of a message, its meaning, and the way out."""


def find_cause(
    pods: Sequence[Manifest],
    events: Sequence[Manifest],
    workloads: Sequence[Manifest] = (),
    gangs: Sequence[Manifest] = (),
) -> Cause | None:
    """Return the first cause of a wait that the messages name; None: there is none.

    Args:
        pods: pods of the run.
        events: events of these, and of their Job or JobSet.
        workloads: Workloads of Kueue.
        gangs: PodGroups of Volcano.
    """
    texts = list(_messages(pods, events, workloads, gangs))
    is_gang = any(GANG_MESSAGE in text for text in texts)
    start = "the pods start together or not at all, and the cause is: " if is_gang else ""
    for pattern, meaning, way_out in (*FINAL_CAUSES, *PASSING_CAUSES):
        for text in texts:
            if match := re.search(pattern, text):
                is_final = any(pattern == final for final, *_ in FINAL_CAUSES)
                meaning = start + meaning.format(match[match.lastindex or 0].rstrip("."))
                return Cause(meaning, way_out, text, is_final)
    known = "Kubernetes gives a reason that wanma does not know"
    return Cause(known, "", texts[0], is_final=False) if texts else None


def _messages(
    pods: Sequence[Manifest],
    events: Sequence[Manifest],
    workloads: Sequence[Manifest],
    gangs: Sequence[Manifest],
) -> Iterator[str]:
    """Yield the newest messages; of pods that run, or are gone, none."""
    for workload in workloads:
        conditions = {entry["type"]: entry for entry in workload.get("status", {}).get("conditions", [])}
        if conditions.get("Admitted", {}).get("status") == "True":
            continue
        for kind in ("QuotaReserved", "Evicted"):
            entry = conditions.get(kind, {})
            if entry.get("status") == ("True" if kind == "Evicted" else "False"):
                yield f"{entry.get('reason', '')}: {entry.get('message', '')}"
    waiting = [pod for pod in pods if pod.get("status", {}).get("phase", "Pending") == "Pending"]
    for pod in waiting:
        status = pod.get("status", {})
        for entry in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
            state = entry.get("state", {}).get("waiting", {})
            if state.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
                yield f"{state['reason']}: {state.get('message', '')}"
        for entry in status.get("conditions", []):
            if entry["type"] == "PodScheduled" and entry["status"] == "False":
                yield f"{entry.get('reason', '')}: {entry.get('message', '')}"
    held = [group for group in gangs if group.get("status", {}).get("phase") in (None, "Pending", "Inqueue")]
    for group in held:
        for entry in group.get("status", {}).get("conditions", []):
            if entry["type"] == "Unschedulable" and entry["status"] == "True":
                yield f"{entry.get('reason', '')}: {entry.get('message', '')}"
    names = {entry["metadata"]["name"] for entry in (*waiting, *held)}
    for event in sorted(events, key=event_time, reverse=True):
        about = event.get("involvedObject", {})
        is_current = about.get("name") in names if about.get("kind") in ("Pod", "PodGroup") else not waiting
        if is_current and event.get("reason") not in ("Scheduled", "Pulling", "Pulled", "Created", "Started"):
            yield f"{event.get('reason', '')}: {event.get('message', '')}"


def event_time(event: Manifest) -> str:
    """Return the time of an event, as sortable text."""
    times = (event.get("lastTimestamp"), event.get("eventTime"), event["metadata"].get("creationTimestamp"))
    return next((time for time in times if time), "")
