"""Kueue: Jobs and JobSets of a queue start when its quota admits them.

https://kueue.sigs.k8s.io/docs/concepts/ ; conditions, reasons and messages: kubernetes-sigs/kueue
apis/kueue/v1beta2/workload_types.go, pkg/scheduler/flavorassigner, pkg/workload/workload.go (an eviction
holds until quota is reserved again) and pkg/workload/evict/evict.go .
One cohort per ClusterQueue: nothing is borrowed.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter

from support.kubernetes.admission import pod_requests
from support.kubernetes.jobs import owner_reference
from support.kubernetes.resources import Object, has_condition, quantity, set_condition
from support.kubernetes.store import Store

QUEUE = "kueue.x-k8s.io/queue-name"
_PRIORITY = "kueue.x-k8s.io/priority-class"


def suspend(plural: str, found: Object) -> None:
    """Suspend what is created with a queue, as Kueue's webhooks do."""
    if plural in ("jobs", "jobsets") and QUEUE in found["metadata"].get("labels", {}):
        found["spec"]["suspend"] = True


class Kueue:
    """Controllers and scheduler of Kueue."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def sync(self) -> None:
        for plural in ("jobs", "jobsets"):
            for job in self.store.list(plural, labels=QUEUE):
                self._sync_workload(plural, job)
        for queue in self.store.list("clusterqueues"):
            self._admit(queue)
        self._report()

    def _sync_workload(self, plural: str, job: Object) -> None:
        metadata = job["metadata"]
        found = next(iter(self.store.owned("workloads", job)), None)
        if found is None:
            if "deletionTimestamp" not in metadata:
                self._create(plural, job)
            return
        for kind in ("Complete", "Completed", "Failed"):
            if has_condition(job, kind) and not has_condition(found, "Finished"):
                ended = next(one for one in job["status"]["conditions"] if one["type"] == kind)
                reason = "Failed" if kind == "Failed" else "Succeeded"
                self._set(found, "Finished", "True", reason, ended["message"])
        if has_condition(found, "Finished"):
            return
        if not found["spec"]["active"] and has_condition(found, "QuotaReserved"):
            self._evict(found, "Deactivated", "The workload is deactivated")
        found = self.store.fresh(found)
        if has_condition(found, "Evicted") and has_condition(found, "QuotaReserved"):
            self._stop(plural, job, found)
        elif has_condition(found, "Admitted") and job["spec"]["suspend"]:
            self._start(plural, job, found)
        queue = metadata["labels"][QUEUE]
        words = None
        local = self.store.find("localqueues", metadata["namespace"], queue)
        if local is None:
            words = f"LocalQueue {queue} doesn't exist"
        elif self.store.find("clusterqueues", "", local["spec"]["clusterQueue"]) is None:
            words = f"ClusterQueue {local['spec']['clusterQueue']} doesn't exist"
        if words and not has_condition(found, "QuotaReserved"):
            self._set(found, "QuotaReserved", "False", "Inadmissible", words)

    def _create(self, plural: str, job: Object) -> None:
        metadata, spec = job["metadata"], job["spec"]
        pod_sets = [{"name": "main", "count": spec.get("parallelism"), "template": spec.get("template")}]
        if plural == "jobsets":
            pod_sets = [
                {"name": one["name"], "template": one["template"]["spec"]["template"]}
                | {"count": one["replicas"] * one["template"]["spec"].get("parallelism", 1)}
                for one in spec["replicatedJobs"]
            ]
        hashed = hashlib.sha1(f"{job['kind']}/{metadata['name']}/{metadata['uid']}".encode()).hexdigest()[:5]
        wanted = metadata["labels"].get(_PRIORITY) or pod_sets[0]["template"]["spec"].get("priorityClassName")
        chosen = self.store.find("priorityclasses", "", wanted or "")
        name = f"{job['kind'].lower()}-{metadata['name']}-{hashed}"
        labels = {"kueue.x-k8s.io/job-uid": metadata["uid"]}
        own = {"name": name, "labels": labels, "ownerReferences": [owner_reference(job)]}
        wants = {"queueName": metadata["labels"][QUEUE], "podSets": copy.deepcopy(pod_sets), "priority": 0}
        made: Object = {"metadata": own, "spec": wants}
        if chosen is not None:
            reference = {"group": "scheduling.k8s.io", "kind": "PriorityClass", "name": wanted}
            made["spec"] |= {"priority": chosen["value"], "priorityClassRef": reference}
        self.store.create("workloads", made, metadata["namespace"])
        words = f"Created Workload: {metadata['namespace']}/{name}"
        self.store.event(job, "Normal", "CreatedWorkload", words, "kueue-job-controller")

    def _set(self, found: Object, kind: str, value: str, reason: str, words: str) -> None:
        changed = self.store.condition(found, kind, value, reason, words)
        if changed and reason in ("Pending", "Inadmissible"):
            self.store.event(found, "Warning", reason, words, "kueue-admission")

    def _start(self, plural: str, job: Object, found: Object) -> None:
        """Let a job run on the flavors that it was given."""
        admission = found["status"]["admission"]
        with self.store.edit(job) as after:
            assignments = admission["podSetAssignments"]
            for template, assigned in zip(_templates(plural, after), assignments, strict=True):
                spec = template["spec"]
                for name in dict.fromkeys(assigned["flavors"].values()):
                    flavor = self.store.get("resourceflavors", "", name)["spec"]
                    if "nodeLabels" in flavor:
                        spec["nodeSelector"] = spec.get("nodeSelector", {}) | flavor["nodeLabels"]
                    if "tolerations" in flavor:
                        spec["tolerations"] = spec.get("tolerations", []) + flavor["tolerations"]
            after["spec"]["suspend"] = False
        words = f"Admitted by clusterQueue {admission['clusterQueue']}"
        self.store.event(job, "Normal", "Started", words, "kueue-job-controller")

    def _stop(self, plural: str, job: Object, found: Object) -> None:
        """Suspend an evicted job; when its pods are gone its quota is free."""
        evicted = next(one for one in found["status"]["conditions"] if one["type"] == "Evicted")
        if not job["spec"]["suspend"]:
            with self.store.edit(job) as after:
                after["spec"]["suspend"] = True
                if plural == "jobs":
                    after["status"].pop("startTime", None)
            self.store.event(job, "Normal", "Stopped", evicted["message"], "kueue-job-controller")
            return
        jobs = [job] if plural == "jobs" else self.store.owned("jobs", job)
        if any(one["status"].get("active") or one["status"].get("terminating") for one in jobs):
            return
        with self.store.edit(job) as after:
            for template, pod_set in zip(_templates(plural, after), found["spec"]["podSets"], strict=True):
                for key in ("nodeSelector", "tolerations"):
                    template["spec"].pop(key, None)
                    if key in pod_set["template"]["spec"]:
                        template["spec"][key] = pod_set["template"]["spec"][key]
        with self.store.edit(found) as after:
            after["status"].pop("admission", None)
            set_condition(after["status"], "QuotaReserved", "False", "Pending", evicted["message"])
            words = "The workload has no reservation"
            set_condition(after["status"], "Admitted", "False", "NoReservation", words)
            if after["spec"]["active"]:
                set_condition(after["status"], "Requeued", "True", evicted["reason"], evicted["message"])

    def _evict(self, found: Object, reason: str, words: str) -> None:
        self.store.condition(found, "Evicted", "True", reason, words)
        self.store.event(found, "Normal", f"EvictedDueTo{reason}", words, "kueue-admission")

    def _unfinished(self) -> list[Object]:
        return [one for one in self.store.list("workloads") if not has_condition(one, "Finished")]

    def _cluster_queue(self, found: Object) -> str:
        local = self.store.find("localqueues", found["metadata"]["namespace"], found["spec"]["queueName"])
        return local["spec"]["clusterQueue"] if local else ""

    def _admit(self, queue: Object) -> None:
        name = queue["metadata"]["name"]
        mine = [
            one for one in self._unfinished() if self._cluster_queue(one) == name and one["spec"]["active"]
        ]
        held = [one for one in mine if has_condition(one, "QuotaReserved")]
        pending = [one for one in mine if one not in held]
        pending.sort(key=lambda one: (-one["spec"].get("priority", 0), one["metadata"]["creationTimestamp"]))
        for one in pending:
            if queue["spec"]["stopPolicy"] != "None":
                self._set(one, "QuotaReserved", "False", "Inadmissible", f"ClusterQueue {name} is inactive")
                continue
            assignments, words = self._assign(queue, one, _usage(held))
            if not words:
                self._reserve(name, one, assignments)
                held.append(self.store.fresh(one))
                continue
            victims = self._victims(queue, one, held)
            for victim in victims:
                uid = one["metadata"]["labels"].get("kueue.x-k8s.io/job-uid", "UNKNOWN")
                why = f"Preempted to accommodate a workload (UID: {one['metadata']['uid']}, JobUID: {uid})"
                why += " due to prioritization in the ClusterQueue"
                if not has_condition(victim, "Evicted"):
                    self._evict(victim, "Preempted", why)
                    self._set(victim, "Preempted", "True", "InClusterQueue", why)
            if victims:
                words += f". Pending the preemption of {len(victims)} workload(s)"
            self._set(one, "QuotaReserved", "False", "Pending", words)
            if queue["spec"]["queueingStrategy"] == "StrictFIFO" or victims:
                break

    def _assign(
        self, queue: Object, found: Object, used: Counter[tuple[str, str]]
    ) -> tuple[list[Object], str]:
        """Return an assignment of flavors for each pod set, or why there is none."""
        assignments, used, mine = [], Counter(used), Counter[tuple[str, str]]()
        for pod_set in found["spec"]["podSets"]:
            count, requests = pod_set["count"], pod_requests(pod_set["template"])
            asked = {name: value * count for name, value in requests.items()}
            flavors: dict[str, str] = {}
            groups = queue["spec"].get("resourceGroups", [])
            covered = {name for group in groups for name in group["coveredResources"]}
            failures = [f"resource {name} unavailable in ClusterQueue" for name in asked.keys() - covered]
            asked |= {"pods": float(count)} if "pods" in covered else {}
            for group in groups if not failures else []:
                names, tried = [name for name in asked if name in group["coveredResources"]], []
                for flavor in group["flavors"]:
                    quotas = {one["name"]: quantity(one["nominalQuota"]) for one in flavor["resources"]}
                    why = [_lack(name, flavor["name"], asked, quotas, used, mine) for name in names]
                    if not any(why):
                        flavors |= dict.fromkeys(names, flavor["name"])
                        break
                    tried += [words for words in why if words]
                else:
                    failures += tried
            if failures:
                words = f"couldn't assign flavors to pod set {pod_set['name']}: {', '.join(failures)}"
                return [], words
            for name, flavor_name in flavors.items():
                used[flavor_name, name] += asked[name]  # type: ignore[assignment]
                mine[flavor_name, name] += asked[name]  # type: ignore[assignment]
            usage = {name: f"{value:g}" for name, value in asked.items() if name in flavors}
            assigned = {"name": pod_set["name"], "count": count, "flavors": flavors, "resourceUsage": usage}
            assignments.append(assigned)
        return assignments, ""

    def _reserve(self, queue: str, found: Object, assignments: list[Object]) -> None:
        with self.store.edit(found) as after:
            after["status"]["admission"] = {"clusterQueue": queue, "podSetAssignments": assignments}
            words = f"Quota reserved in ClusterQueue {queue}"
            set_condition(after["status"], "QuotaReserved", "True", "QuotaReserved", words)
            set_condition(after["status"], "Admitted", "True", "Admitted", "The workload is admitted")
            for before in list(after["status"]["conditions"]):  # pkg/workload/workload.go
                if before["type"] in ("Evicted", "Preempted") and before["status"] == "True":
                    words = f"Previously: {before['message']}"
                    set_condition(after["status"], before["type"], "False", "QuotaReserved", words)
        words = f"Quota reserved in ClusterQueue {queue}, wait time since queued was 0s"
        self.store.event(found, "Normal", "QuotaReserved", words, "kueue-admission")
        words = f"Admitted by ClusterQueue {queue}, wait time since reservation was 0s"
        self.store.event(found, "Normal", "Admitted", words, "kueue-admission")

    def _victims(self, queue: Object, found: Object, held: list[Object]) -> list[Object]:
        """https://kueue.sigs.k8s.io/docs/concepts/preemption/ ; pkg/scheduler/preemption/common ."""
        if queue["spec"]["preemption"].get("withinClusterQueue", "Never") == "Never":
            return []
        mine = found["spec"].get("priority", 0)
        lower = [one for one in held if one["spec"].get("priority", 0) < mine]
        lower.sort(key=_reservation_time, reverse=True)  # the newest first
        lower.sort(key=lambda one: int(one["spec"]["priority"]))
        victims: list[Object] = []
        for one in lower:
            victims.append(one)
            kept = [other for other in held if other not in victims]
            if not self._assign(queue, found, _usage(kept))[1]:
                return victims
        return []

    def _report(self) -> None:
        for plural in ("clusterqueues", "localqueues"):
            for queue in self.store.list(plural):
                _, namespace, name = self.store.key(queue)
                some = [
                    one
                    for one in self._unfinished()
                    if (not namespace and self._cluster_queue(one) == name)
                    or (one["metadata"]["namespace"], one["spec"]["queueName"]) == (namespace, name)
                ]
                reserving = [one for one in some if has_condition(one, "QuotaReserved")]
                used: dict[str, list[Object]] = {}
                for (flavor, resource), value in sorted(_usage(reserving).items()):
                    used.setdefault(flavor, []).append({"name": resource, "total": f"{value:g}"})
                listed = [{"name": flavor, "resources": values} for flavor, values in used.items()]
                with self.store.edit(queue) as after:
                    status = after.setdefault("status", {})
                    status["pendingWorkloads"] = len(some) - len(reserving)
                    status["reservingWorkloads"] = len(reserving)
                    status["admittedWorkloads"] = sum(has_condition(one, "Admitted") for one in some)
                    status |= {"flavorsReservation": listed, "flavorsUsage": listed}
                    set_condition(status, "Active", "True", "Ready", "Can admit new workloads")


def _lack(
    name: str, flavor: str, asked: dict[str, float], quotas: dict[str, float],
    used: Counter[tuple[str, str]], mine: Counter[tuple[str, str]],
) -> str:  # fmt: skip
    quota, value, before = quotas[name], asked[name], mine[flavor, name]
    if value + before > quota:
        words = f"insufficient quota for {name} in flavor {flavor}, previously considered podsets requests"
        return f"{words} ({before:g}) + current podset request ({value:g}) > maximum capacity ({quota:g})"
    if value + used[flavor, name] > quota:
        more = value + used[flavor, name] - quota
        return f"insufficient unused quota for {name} in flavor {flavor}, {more:g} more needed"
    return ""


def _reservation_time(found: Object) -> str:
    reserved = (one for one in found["status"]["conditions"] if one["type"] == "QuotaReserved")
    return str(next(reserved)["lastTransitionTime"])


def _usage(held: list[Object]) -> Counter[tuple[str, str]]:
    used: Counter[tuple[str, str]] = Counter()
    for one in held:
        for assigned in one["status"]["admission"]["podSetAssignments"]:
            for name, flavor in assigned["flavors"].items():
                used[flavor, name] += quantity(assigned["resourceUsage"][name])  # type: ignore[assignment]
    return used


def _templates(plural: str, job: Object) -> list[Object]:
    if plural == "jobs":
        return [job["spec"]["template"]]
    return [one["template"]["spec"]["template"] for one in job["spec"]["replicatedJobs"]]
