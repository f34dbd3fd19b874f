"""The Job controller: Indexed and other Jobs.

https://kubernetes.io/docs/concepts/workloads/controllers/job/ ; reasons and messages:
kubernetes/kubernetes pkg/controller/job/job_controller.go
"""

from __future__ import annotations

import copy
import time
from typing import Any

from support.kubernetes.resources import (
    Object,
    RefusalError,
    age,
    has_condition,
    now,
    refuse_unknown,
    set_condition,
)
from support.kubernetes.store import Store, suffix

_FINALIZER = "batch.kubernetes.io/job-tracking"
_INDEX = "batch.kubernetes.io/job-completion-index"
_OVER = ("Succeeded", "Failed")


class Jobs:
    """Controller of all Jobs; `backoff_seconds` is the delay before the first pod is made anew."""

    def __init__(self, store: Store, backoff_seconds: float) -> None:
        self.store, self.backoff_seconds = store, backoff_seconds
        self._retry: dict[str, float] = {}

    def sync(self) -> None:
        for pod in self.store.list("pods"):  # those whose Job is gone are not counted any more
            is_tracked = _FINALIZER in pod["metadata"].get("finalizers", [])
            if is_tracked and not any(
                one["kind"] == "Job" and self._is_known(pod, one) for one in _owners(pod)
            ):
                self._untrack(pod)
        for job in self.store.list("jobs"):
            self._sync(job)

    def _is_known(self, pod: Object, reference: Object) -> bool:
        job = self.store.find("jobs", pod["metadata"]["namespace"], reference["name"])
        return job is not None and job["metadata"]["uid"] == reference["uid"]

    def _untrack(self, pod: Object) -> None:
        with self.store.edit(pod) as after:
            left = [one for one in after["metadata"].get("finalizers", []) if one != _FINALIZER]
            after["metadata"]["finalizers"] = left

    def _sync(self, job: Object) -> None:
        spec, metadata = job["spec"], job["metadata"]
        if has_condition(job, "Complete") or has_condition(job, "Failed"):
            self._clean_up(job)
            return
        refuse_unknown(spec, "backoffLimitPerIndex", "maxFailedIndexes", "successPolicy", "managedBy")
        if "deletionTimestamp" in metadata:
            for pod in self.store.owned("pods", job):
                self._untrack(pod)
            return
        pods = self.store.owned("pods", job)
        with self.store.edit(job) as after:
            if "selector" not in after["spec"]:
                label = {"batch.kubernetes.io/controller-uid": metadata["uid"]}
                after["spec"]["selector"] = {"matchLabels": label}
            verdict = self._count(after, pods)
            self._suspension(after)
        job = self.store.fresh(job)
        pods = [pod for pod in self.store.owned("pods", job) if pod["status"]["phase"] not in _OVER]
        active = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        status, done = job["status"], _done(job["status"])
        completions = spec.get("completions")
        if verdict is None and status.get("failed", 0) > spec["backoffLimit"]:
            verdict = ("BackoffLimitExceeded", "Job has reached the specified backoff limit")
        limit, start = spec.get("activeDeadlineSeconds"), status.get("startTime")
        if verdict is None and limit and start and not spec["suspend"] and age(start) >= limit:
            verdict = ("DeadlineExceeded", "Job was active longer than specified deadline")
        is_complete = status.get("succeeded", 0) >= (completions or 1) and (
            completions is not None or not active
        )
        if verdict is not None:
            self._finish(job, active, "Failed", *verdict)
        elif is_complete:
            self._finish(
                job, active, "Complete", "CompletionsReached", "Reached expected number of succeeded pods"
            )
        elif spec["suspend"]:
            self._delete(job, active)
        else:
            self._scale(job, pods, active, done)
        self._report(job)

    def _count(self, job: Object, pods: list[Object]) -> tuple[str, str] | None:
        """Count pods that have ended since; returns why the Job fails, if a rule says so."""
        status, verdict = job["status"], None
        for pod in pods:
            is_over = pod["status"]["phase"] in _OVER
            if job["spec"]["podReplacementPolicy"] == "TerminatingOrFailed":
                is_over |= "deletionTimestamp" in pod["metadata"]
            if _FINALIZER not in pod["metadata"].get("finalizers", []) or not is_over:
                continue
            if pod["status"]["phase"] == "Succeeded":
                done = _done(status)
                index = pod["metadata"].get("annotations", {}).get(_INDEX)
                if index is None or int(index) not in done:
                    status["succeeded"] = status.get("succeeded", 0) + 1
                if index is not None:
                    status["completedIndexes"] = _ranges(sorted({*done, int(index)}))
            elif not job["spec"]["suspend"]:  # what a suspension ends has not failed
                action, words = _rule(job, pod)
                if action != "Ignore":
                    status["failed"] = status.get("failed", 0) + 1
                if action == "FailJob" and verdict is None:
                    verdict = ("PodFailurePolicy", words)
                delay = self.backoff_seconds * 2 ** min(6, max(0, status.get("failed", 0) - 1))
                self._retry[job["metadata"]["uid"]] = time.monotonic() + delay
            self._untrack(pod)
        return verdict

    def _suspension(self, job: Object) -> None:
        status, is_suspended = job["status"], job["spec"]["suspend"]
        if is_suspended and set_condition(status, "Suspended", "True", "JobSuspended", "Job suspended"):
            status.pop("startTime", None)
            self._event(job, "Normal", "Suspended", "Job suspended")
        elif not is_suspended:
            if has_condition(job, "Suspended"):
                set_condition(status, "Suspended", "False", "JobResumed", "Job resumed")
                self._event(job, "Normal", "Resumed", "Job resumed")
                status.pop("startTime", None)
            status.setdefault("startTime", now())

    def _delete(self, job: Object, pods: list[Object]) -> None:
        for pod in pods:
            self.store.delete(pod)
            self._event(job, "Normal", "SuccessfulDelete", f"Deleted pod: {pod['metadata']['name']}")

    def _scale(self, job: Object, pods: list[Object], active: list[Object], done: set[int]) -> None:
        spec = job["spec"]
        is_late = time.monotonic() < self._retry.get(job["metadata"]["uid"], 0.0)
        holders = pods if spec["podReplacementPolicy"] == "Failed" else active
        wanted = min(
            spec["parallelism"], spec.get("completions", 1 << 30) - job["status"].get("succeeded", 0)
        )
        self._delete(job, active[wanted:])
        if is_late or len(holders) >= wanted:
            return
        indexes: list[int | None] = [None] * (wanted - len(holders))
        if spec["completionMode"] == "Indexed":
            taken = done | {int(pod["metadata"]["annotations"][_INDEX]) for pod in holders}
            free = [index for index in range(spec["completions"]) if index not in taken]
            indexes = [*free[: wanted - len(holders)]]
        for index in indexes:
            self._create(job, index)

    def _create(self, job: Object, index: int | None) -> None:
        pod, name = copy.deepcopy(job["spec"]["template"]), job["metadata"]["name"]
        metadata = pod.setdefault("metadata", {})
        labels = metadata.setdefault("labels", {})
        for prefix in ("", "batch.kubernetes.io/"):
            labels |= {f"{prefix}job-name": name, f"{prefix}controller-uid": job["metadata"]["uid"]}
        metadata["finalizers"] = [_FINALIZER]
        metadata["ownerReferences"] = [owner_reference(job)]
        metadata["name"] = f"{name}-{suffix()}" if index is None else f"{name}-{index}-{suffix()}"
        if index is not None:
            labels[_INDEX] = str(index)
            metadata.setdefault("annotations", {})[_INDEX] = str(index)
            pod["spec"]["hostname"] = f"{name}-{index}"
            source = {"fieldRef": {"fieldPath": f"metadata.labels['{_INDEX}']"}}
            for key in ("containers", "initContainers"):
                for container in pod["spec"].get(key, []):
                    env = container.setdefault("env", [])
                    env.append({"name": "JOB_COMPLETION_INDEX", "valueFrom": source})
        try:
            self.store.create("pods", pod, job["metadata"]["namespace"])
        except RefusalError as refusal:
            self._retry[job["metadata"]["uid"]] = time.monotonic() + self.backoff_seconds
            self._event(job, "Warning", "FailedCreate", f"Error creating: {refusal.message}")
            return
        self._event(job, "Normal", "SuccessfulCreate", f"Created pod: {metadata['name']}")

    def _finish(self, job: Object, active: list[Object], kind: str, reason: str, words: str) -> None:
        first = "SuccessCriteriaMet" if kind == "Complete" else "FailureTarget"
        self.store.condition(job, first, "True", reason, words)
        self._delete(job, active)
        if any(pod["status"]["phase"] not in _OVER for pod in self.store.owned("pods", job)):
            return  # the Job is over when its pods are
        with self.store.edit(job) as after:
            set_condition(after["status"], kind, "True", reason, words)
            after["status"] |= {"completionTime": now()} if kind == "Complete" else {}
        if kind == "Complete":
            self._event(job, "Normal", "Completed", "Job completed")
        else:
            self._event(job, "Warning", reason, words)

    def _report(self, job: Object) -> None:
        pods = [pod for pod in self.store.owned("pods", job) if pod["status"]["phase"] not in _OVER]
        active = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        with self.store.edit(job) as after:
            after["status"]["active"] = len(active)
            after["status"]["terminating"] = len(pods) - len(active)
            after["status"]["ready"] = sum(has_condition(pod, "Ready") for pod in active)
            after["status"]["uncountedTerminatedPods"] = {}

    def _clean_up(self, job: Object) -> None:
        for pod in self.store.owned("pods", job):
            if _FINALIZER in pod["metadata"].get("finalizers", []):
                self._untrack(pod)
        ttl = job["spec"].get("ttlSecondsAfterFinished")
        ended = [one for one in job["status"]["conditions"] if one["type"] in ("Complete", "Failed")]
        if ttl is not None and age(ended[0]["lastTransitionTime"]) >= ttl:
            self.store.delete(job, "Background")

    def _event(self, job: Object, kind: str, reason: str, message: str) -> None:
        self.store.event(job, kind, reason, message, "job-controller")


def owner_reference(owner: Object) -> Object:
    """Return the reference to an object's controller."""
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _owners(pod: Object) -> list[Object]:
    owners: list[Object] = pod["metadata"].get("ownerReferences", [])
    return owners


def _rule(job: Object, pod: Object) -> tuple[str, str]:
    """Return the action of the first rule of the pod failure policy that matches.

    https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy
    """
    name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    for number, rule in enumerate(job["spec"].get("podFailurePolicy", {}).get("rules", [])):
        for pattern in rule.get("onPodConditions", []):
            for one in pod["status"].get("conditions", []):
                if (one["type"], one["status"]) == (pattern["type"], pattern.get("status", "True")):
                    words = f"Pod {name} has condition {one['type']} matching {rule['action']} rule"
                    return rule["action"], f"{words} at index {number}"
        codes = rule.get("onExitCodes")
        statuses = [
            *pod["status"].get("containerStatuses", []),
            *pod["status"].get("initContainerStatuses", []),
        ]
        for one in statuses if codes else []:
            code = one["state"].get("terminated", {}).get("exitCode", 0)
            is_named = codes.get("containerName", one["name"]) == one["name"]
            if code and is_named and (code in codes["values"]) == (codes["operator"] == "In"):
                words = f"Container {one['name']} for pod {name} failed with exit code {code} matching "
                return rule["action"], words + f"{rule['action']} rule at index {number}"
    return "Count", ""


def _done(status: Any) -> set[int]:
    """Return the indexes that '0,3-5' names."""
    made: set[int] = set()
    for part in status.get("completedIndexes", "").split(",") if status.get("completedIndexes") else ():
        first, _, last = part.partition("-")
        made |= set(range(int(first), int(last or first) + 1))
    return made


def _ranges(indexes: list[int]) -> str:
    runs: list[list[int]] = []
    for index in indexes:
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
