"""The schedulers: the default one binds pending pods to nodes, Volcano's whole groups of them.

https://kubernetes.io/docs/concepts/scheduling-eviction/
"""

from __future__ import annotations

from collections import Counter

from support.kubernetes.admission import pod_requests
from support.kubernetes.resources import Object, quantity, refuse_unknown, set_condition
from support.kubernetes.store import Store

_GROUP = "scheduling.k8s.io/group-name"
_NO_VICTIMS = "No preemption victims found for incoming pod"
_NO_HELP = "Preemption is not helpful for scheduling"


class Scheduler:
    """Scheduler of one cluster.

    Attributes:
        autoscaler: event of the cluster autoscaler for a pod that does not fit: '' (there is none),
            'TriggeredScaleUp' or 'NotTriggerScaleUp'.
    """

    def __init__(self, store: Store) -> None:
        self.store, self.autoscaler = store, ""

    def sync(self) -> None:
        pending = [
            pod
            for pod in self.store.list("pods")
            if not pod["spec"].get("nodeName") and "deletionTimestamp" not in pod["metadata"]
        ]
        pending.sort(
            key=lambda pod: (-pod["spec"].get("priority", 0), int(pod["metadata"]["resourceVersion"]))
        )
        for pod in pending:
            if pod["spec"]["schedulerName"] == "default-scheduler" and pod["status"]["phase"] == "Pending":
                name, words = self._place(pod, [])
                if name:
                    self._bind(pod, name)
                else:
                    self._refuse(pod, words)
        for group in self.store.list("podgroups"):
            self._schedule_gang(group, [pod for pod in pending if pod["spec"]["schedulerName"] == "volcano"])

    def _schedule_gang(self, group: Object, pending: list[Object]) -> None:
        """Bind the pods of a PodGroup if enough of them fit together: https://volcano.sh/en/docs/podgroup/ .

        Messages: volcano-sh/volcano pkg/scheduler/cache/cache.go
        """
        _, namespace, name = self.store.key(group)
        pods = self.store.list("pods", namespace)
        members = [one for one in pods if one["metadata"].get("annotations", {}).get(_GROUP) == name]
        waiting, taken, count = [one for one in members if one in pending], [], group["spec"]["minMember"]
        if not waiting:
            return
        for pod in waiting:
            place, words = self._place(pod, taken)
            if place:
                taken.append((pod, place))
            else:
                self.store.condition(pod, "PodScheduled", "False", "Unschedulable", words)
        is_ready = len(members) - len(waiting) + len(taken) >= count
        for pod, place in taken if is_ready else []:
            self._bind(pod, place)
        words = f"{len(waiting)}/{len(members)} tasks in gang unschedulable: pod group is not ready, "
        words += f"{len(waiting)} Pending, {count} minAvailable; Pending: {len(taken)} Schedulable, "
        words += f"{len(waiting) - len(taken)} Unschedulable"
        with self.store.edit(group) as after:
            status = after.setdefault("status", {})
            status["phase"] = "Running" if is_ready else "Inqueue"
            if is_ready:
                set_condition(status, "Scheduled", "True", "tasks in gang are ready to be scheduled")
            else:
                set_condition(status, "Unschedulable", "True", "NotEnoughResources", words)
        if not is_ready:
            self.store.event(group, "Warning", "Unschedulable", words, "volcano")

    def _place(self, pod: Object, taken: list[tuple[Object, str]]) -> tuple[str, str]:
        """Return the node that a pod fits on beside all others and those of `taken`, or why there is none."""
        refuse_unknown(pod["spec"], "topologySpreadConstraints", "schedulingGates", "resourceClaims")
        refuse_unknown(pod["spec"].get("affinity", {}), "podAffinity", "podAntiAffinity")
        others = [(one, one["spec"].get("nodeName", "")) for one in self.store.list("pods")] + taken
        load = Counter(name for _, name in others)
        nodes = sorted(  # spread, unless the pod prefers some
            self.store.list("nodes"),
            key=lambda one: (-_preference(pod, one), load[one["metadata"]["name"]]),
        )
        if words := self._claims(pod):
            return "", f"0/{len(nodes)} nodes are available: {words}."
        why, help_ = Counter[str](), Counter[str]()
        for node in nodes:
            reasons = self._reasons(pod, node, others)
            if not reasons:
                return node["metadata"]["name"], ""
            why.update(reasons)
        # kubernetes/kubernetes pkg/scheduler/framework/types.go, FitError: reasons sorted by their text
        for reason, count in why.items():
            is_full = reason.startswith(("Insufficient", "Too many"))
            help_[_NO_VICTIMS if is_full else _NO_HELP] += count
        first, second = (
            f"0/{len(nodes)} nodes are available: "
            + ", ".join(sorted(f"{count} {reason}" for reason, count in counts.items()))
            for counts in (why, help_)
        )
        return "", f"{first}. preemption: {second}." if nodes else "no nodes available to schedule pods"

    def _bind(self, pod: Object, name: str) -> None:
        with self.store.edit(pod) as after:
            after["spec"]["nodeName"] = name
            set_condition(after["status"], "PodScheduled", "True")
        words = f"Successfully assigned {pod['metadata']['namespace']}/{pod['metadata']['name']} to {name}"
        self.store.event(pod, "Normal", "Scheduled", words, pod["spec"]["schedulerName"])

    def _claims(self, pod: Object) -> str:
        for volume in pod["spec"].get("volumes", []):
            name = volume.get("persistentVolumeClaim", {}).get("claimName")
            claim = self.store.find("persistentvolumeclaims", pod["metadata"]["namespace"], name or "")
            if name and claim is None:
                return f'persistentvolumeclaim "{name}" not found'
            if claim is not None and claim.get("status", {}).get("phase") != "Bound":
                return "pod has unbound immediate PersistentVolumeClaims"
        return ""

    def _reasons(self, pod: Object, node: Object, others: list[tuple[Object, str]]) -> list[str]:
        if node["spec"].get("unschedulable"):
            return ["node(s) were unschedulable"]
        for taint in node["spec"].get("taints", []):
            if taint["effect"] != "PreferNoSchedule" and not tolerates(pod, taint):
                return [f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"]
        labels = node["metadata"].get("labels", {})
        if not pod["spec"].get("nodeSelector", {}).items() <= labels.items() or not _has_affinity(
            pod, labels
        ):
            return ["node(s) didn't match Pod's node affinity/selector"]
        allocatable, asked = node["status"]["allocatable"], {**pod_requests(pod), "pods": 1.0}
        used: Counter[str] = Counter()
        for other, name in others:
            if name == node["metadata"]["name"] and other["status"]["phase"] not in ("Succeeded", "Failed"):
                used.update({**pod_requests(other), "pods": 1.0})
        return [
            "Too many pods" if name == "pods" else f"Insufficient {name}"
            for name, value in asked.items()
            if value and value + used[name] > quantity(allocatable.get(name, 0)) + 1e-9
        ]

    def _refuse(self, pod: Object, words: str) -> None:
        if self.store.condition(pod, "PodScheduled", "False", "Unschedulable", words):
            self.store.event(pod, "Warning", "FailedScheduling", words, "default-scheduler")
        # https://github.com/kubernetes/autoscaler/blob/master/cluster-autoscaler/FAQ.md
        if self.autoscaler == "TriggeredScaleUp":
            words = "pod triggered scale-up: [{pool 2->3 (max: 4)}]"
            self.store.event(pod, "Normal", self.autoscaler, words, "cluster-autoscaler")
        elif self.autoscaler:
            words = "pod didn't trigger scale-up: 1 max node group size reached"
            self.store.event(pod, "Normal", self.autoscaler, words, "cluster-autoscaler")


def tolerates(pod: Object, taint: Object) -> bool:
    """https://kubernetes.io/docs/concepts/scheduling-eviction/taint-and-toleration/ ."""
    return any(
        one.get("effect", taint["effect"]) == taint["effect"]
        and one.get("key", taint["key"]) == taint["key"]
        and (one.get("operator") == "Exists" or one.get("value", "") == taint.get("value", ""))
        for one in pod["spec"].get("tolerations", [])
    )


def _has_affinity(pod: Object, labels: dict[str, str]) -> bool:
    affinity = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms")
    return required is None or any(
        all(_is_met(one, labels) for one in term.get("matchExpressions", [])) for term in required
    )


def _preference(pod: Object, node: Object) -> int:
    """https://kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node/#node-affinity ."""
    affinity = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    terms = affinity.get("preferredDuringSchedulingIgnoredDuringExecution", [])
    names = {"metadata.name": node["metadata"]["name"]}
    return sum(
        term["weight"]
        for term in terms
        if all(_is_met(one, names) for one in term["preference"]["matchFields"])
    )


def _is_met(expression: Object, labels: dict[str, str]) -> bool:
    value, operator = labels.get(expression["key"]), expression["operator"]
    if operator in ("Exists", "DoesNotExist"):
        return (value is not None) == (operator == "Exists")
    if operator in ("Gt", "Lt"):
        limit = int(expression["values"][0])
        return value is not None and (int(value) > limit if operator == "Gt" else int(value) < limit)
    return (value in expression["values"]) == (operator == "In")
