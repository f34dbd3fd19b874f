"""Causes for which a run waits or cannot start, from conditions and events, in plain words.

Messages: kube-scheduler and kubelet (kubernetes.io/docs/tasks/debug/debug-application/debug-pods), Kueue
(kueue.sigs.k8s.io/docs/tasks/troubleshooting), cluster-autoscaler (its FAQ), Karpenter (karpenter.sh).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from wanma.engines.kubernetes.manifests import QUEUE_LABEL, Manifest


@dataclass(frozen=True)
class Cause:
    """Cause of a wait."""

    meaning: str
    """The cause in words."""
    way_out: str
    message: str
    """Message of Kubernetes."""
    is_final: bool = False
    """True if waiting alone does not help."""


CAUSES: tuple[tuple[str, str, str, bool], ...] = (
    (
        r"ErrImagePull|ImagePullBackOff|InvalidImageName|ErrImageNeverPull",
        "the image cannot be pulled",
        "correct cluster.kubernetes.image, or set image_pull_secrets for its registry",
        True,
    ),
    (
        r"CreateContainerConfigError|CreateContainerError|couldn't find key|secret \S+ not found",
        "a Secret or setting of the container is missing",
        "correct cluster.kubernetes.secret_environment; `kubectl get secrets` lists those of the namespace",
        True,
    ),
    (
        r"persistentvolumeclaim \S+ not found|unbound immediate PersistentVolumeClaims|FailedMount|"
        r"FailedAttachVolume|Multi-Attach|volume node affinity",
        "the volume cannot be mounted",
        "check the claim cluster.kubernetes.volume: it must exist, be bound, and be ReadWriteMany for several nodes",
        True,
    ),
    (
        r"exceeded quota",
        "the ResourceQuota of the namespace has no room",
        "wait for other runs, or use fewer nodes; `kubectl describe quota` shows what is used",
        False,
    ),
    (
        r"FailedCreate.*(maximum|minimum|limit).* usage per|must specify",
        "a LimitRange or ResourceQuota of the namespace forbids pods of this form",
        "set cluster.kubernetes.cpu and memory within it; `kubectl describe limitrange,quota` shows them",
        True,
    ),
    (
        r"violates PodSecurity",
        "the namespace admits only pods with fewer rights",
        "set cluster.kubernetes.run_as_user",
        True,
    ),
    (
        r"no PriorityClass|serviceaccount .* not found",
        "a name of the job does not exist",
        "correct cluster.kubernetes.priority_class or service_account",
        True,
    ),
    (
        r"LocalQueue .* doesn't exist|ClusterQueue .* doesn't exist",
        "Kueue has no such queue in this namespace",
        "correct cluster.kubernetes.queue; `kubectl get localqueues` lists them",
        True,
    ),
    (
        r"is inactive|is stopped",
        "the queue of Kueue is stopped",
        "choose another queue, or ask its administrator",
        False,
    ),
    (
        r"maximum capacity|insufficient quota for|unavailable in ClusterQueue|Workload namespace doesn't match",
        "the queue of Kueue can never give so much",
        "use fewer nodes, or another queue: `kubectl describe clusterqueue` shows its quota",
        True,
    ),
    (
        r"insufficient unused quota|waiting for|Waiting for|preempt",
        "the quota of the queue of Kueue is in use",
        "it starts when others end; fewer nodes may start sooner",
        False,
    ),
    (
        r"Preempted|Evicted",
        "Kueue has taken the nodes for a workload of higher priority",
        "it resumes from its checkpoint when there is room again",
        False,
    ),
    (
        r"TriggeredScaleUp|Nominated|pod triggered scale-up|should schedule on",
        "new nodes have been asked of the autoscaler, and are awaited",
        "",
        False,
    ),
    (
        r"NotTriggerScaleUp|didn't trigger scale-up|no (nodepool|instance type)|incompatible with (nodepool|provisioner)",
        "the autoscaler has no kind of nodes that fits",
        "correct cluster.kubernetes.node_selector, tolerations or gpu_resource, or use smaller pods",
        True,
    ),
    (
        r"Insufficient (\S+)",
        "too few nodes have that much free: {0}",
        "sizes",
        False,
    ),
    (
        r"untolerated taint \{([^:}]+)",
        "nodes have a taint that the pods do not tolerate: {0}",
        "add it to cluster.kubernetes.tolerations if your runs may use these nodes",
        False,
    ),
    (
        r"didn't match Pod's node affinity/selector|node\(s\) didn't match",
        "no node has the labels",
        "correct cluster.kubernetes.node_selector or gpu_product; `kubectl get nodes --show-labels` lists them",
        False,
    ),
    (r"unschedulable|not-ready|no nodes available", "the nodes are cordoned or not ready", "sizes", False),
)
"""Pattern of a message, its meaning, the way out ('sizes': what would start now), and whether waiting is vain."""


def find_cause(
    pods: Sequence[Manifest], events: Sequence[Manifest], workloads: Sequence[Manifest] = ()
) -> Cause | None:
    """Return the cause of a wait that comes first in `CAUSES` and still holds; None: none is known.

    Args:
        pods: pods of the run.
        events: events of these, and of their Job or JobSet.
        workloads: Workloads of Kueue.
    """
    texts = list(_messages(pods, events, workloads))
    for pattern, meaning, way_out, is_final in CAUSES:
        for text in texts:
            if match := re.search(pattern, text):
                value = (match.groups() or ("",))[0] or ""
                return Cause(meaning.format(value.rstrip(",.")), way_out, text, is_final)
    if texts:
        return Cause("Kubernetes gives a reason that wanma does not know", "", texts[0])
    return None


def _messages(
    pods: Sequence[Manifest], events: Sequence[Manifest], workloads: Sequence[Manifest]
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
    names = {pod["metadata"]["name"] for pod in waiting}
    all_pods = {pod["metadata"]["name"] for pod in pods}
    for event in sorted(events, key=event_time, reverse=True):
        about = event.get("involvedObject", {})
        is_current = about.get("name") in names if about.get("kind") == "Pod" else not all_pods
        if is_current and event.get("reason") not in ("Scheduled", "Pulling", "Pulled", "Created", "Started"):
            yield f"{event.get('reason', '')}: {event.get('message', '')}"


def event_time(event: Manifest) -> str:
    """Return the time of an event, as sortable text."""
    times = (event.get("lastTimestamp"), event.get("eventTime"), event["metadata"].get("creationTimestamp"))
    return next((time for time in times if time), "")


def uses_queue(manifest: Manifest) -> bool:
    """Return True if Kueue decides when an object starts."""
    return QUEUE_LABEL in manifest["metadata"].get("labels", {})
