"""Kubernetes engine: objects by the official client, which are the only record of a run beside its handle."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from wanma.engines.engine import (
    Engine,
    EngineCluster,
    Explanation,
    Handle,
    RunStatus,
    Submission,
)
from wanma.engines.kubernetes.client import KubernetesClient, KubernetesError
from wanma.engines.kubernetes.discovery import discover_cluster
from wanma.engines.kubernetes.manifests import (
    CONTAINER,
    RUN_LABEL,
    Manifest,
    first_host,
    make_placement,
    render_manifests,
    render_secret,
    to_yaml,
)
from wanma.engines.kubernetes.object_store import ObjectStore, check_store
from wanma.engines.kubernetes.states import (
    CANCEL_FILE,
    Observation,
    explain_wait,
    mark_cancelled,
    pod_names,
    read_status,
    true_conditions,
)
from wanma.engines.kubernetes.volume import Volume, is_ready
from wanma.engines.lease.shell_time import limit_time
from wanma.job.errors import EXIT_USAGE, JobError, WanmaError
from wanma.job.run.run_directory import RunDirectory, write_atomically
from wanma.job.sections.cluster import ClusterSection
from wanma.job.sections.kubernetes import KubernetesSection
from wanma.observe.units import duration_text

FETCHED_FILE = "kubernetes-fetched"
"""File in the folder of the submission: the run had ended when its records were fetched."""
ENDS = {"Complete", "Completed", "Failed"}
"""Conditions of a Job or JobSet that has ended."""
OUTPUT_LINES = 2_000
"""Last lines of a supervisor's output that are kept."""


class KubernetesEngine(Engine):
    """Engine of a Kubernetes cluster; its handle holds the names of a run's objects and the settings."""

    name = "kubernetes"
    ends_with_caller = False
    preference = "the pods prefer them"

    def __init__(self) -> None:
        self._clients: dict[tuple[str | None, str | None], KubernetesClient] = {}

    def unusable_reason(self) -> str | None:
        try:
            self._client(KubernetesSection()).check()
        except WanmaError as error:
            return f"{error.message}; {error.hint}" if error.hint else error.message
        return None

    def discover(
        self, section: ClusterSection, _data: Mapping[str, str] | None = None, /
    ) -> EngineCluster | None:
        return discover_cluster(self._client(section.kubernetes), section)

    def render(self, submission: Submission) -> str:
        settings = submission.settings.kubernetes
        kind = "jobset" if settings.resource == "auto" else settings.resource
        name = make_placement(submission.run_directory, settings).name
        manifests = render_manifests(submission, kind)
        for number in range(submission.nodes - submission.min_nodes if kind != "trainjob" else 0):
            manifests += render_manifests(submission, kind, joining=f"{name}-{number + 2}")
        note = f"# The Secret {name}, with the key 'secret', is made by the submission, and not shown."
        return f"{note}\n{to_yaml(manifests)}"

    def submit(self, submission: Submission) -> Handle:
        settings, run = submission.settings.kubernetes, RunDirectory(submission.run_directory)
        kind = self._kind(settings)
        manifests = render_manifests(submission, kind)  # which refuses settings that are missing
        placement = make_placement(run.path, settings)
        client = self._client(settings)
        self._check(client, submission)
        earlier = client.get(_api_kind(kind), placement.name)
        if earlier is not None and not ENDS & true_conditions(earlier).keys():
            raise WanmaError(
                f"{kind} {placement.name}, of this run directory, has not ended, and has no record here",
                f"`kubectl delete {kind} {placement.name}` ends it, with a checkpoint",
                EXIT_USAGE,
            )
        for ended in (_api_kind(kind), "Secret", "Service", "PodGroup"):
            client.delete(ended, placement.name)
        client.await_absence(_api_kind(kind), f"{RUN_LABEL}={placement.name}")
        if not placement.is_shared:
            with _files(client, settings, run, kind) as files:
                files.send(run, submission.code)
        for file in (CANCEL_FILE, FETCHED_FILE):
            (run.engine_files / file).unlink(missing_ok=True)
        first = _create(client, [render_secret(submission), *manifests])
        handle = {
            "name": placement.name,
            "kind": kind,
            "jobs": [placement.name],
            "newest": 1,
            "min_nodes": submission.min_nodes,
            "requeue_exit_code": submission.settings.requeue_exit_code,
            "settings": settings.model_dump(mode="json", exclude_unset=True),
            "namespace": client.namespace,
            "run_directory": str(run.path),
        }
        try:
            handle = self._join(handle, submission, first, submission.nodes - submission.min_nodes)
        except BaseException:
            client.delete(_api_kind(kind), placement.name)
            raise
        if settings.wait_seconds is not None:
            _start_deadline(run, settings.wait_seconds)
        return handle

    def statuses(self, handles: Sequence[Handle]) -> list[RunStatus]:
        found: list[RunStatus] = []
        for handle in handles:
            observation = self._observe(handle)
            status = read_status(handle, observation)
            limit = _settings(handle).wait_seconds
            if status.is_over and observation.first is not None:
                for name in handle["jobs"][1:]:  # they wait in vain
                    self._client(_settings(handle)).delete(_api_kind(handle["kind"]), name)
            if status.state == "pending" and limit is not None and observation.waiting_seconds > limit:
                reason = explain_wait(handle, observation).summary
                reason = f"withdrawn after {duration_text(limit)}: {reason}"
                mark_cancelled(handle, reason)
                self._delete(handle, is_immediate=True)
                status = RunStatus("failed", None, reason, (), status.job_ids)
            found.append(status)
        return found

    def hosts(self, handle: Handle, /) -> tuple[str, ...]:
        return pod_names(self._observe(handle).pods)

    def log_files(self, handle: Handle) -> list[Path]:
        folder = RunDirectory(Path(handle["run_directory"])).engine_files
        client = self._client(_settings(handle))
        try:
            for pod in client.list("Pod", f"{RUN_LABEL}={handle['name']}"):
                if text := client.log_tail(pod["metadata"]["name"], OUTPUT_LINES):
                    write_atomically(folder / f"{pod_names([pod])[0]}.log", text)
        except KubernetesError as error:
            if error.status:  # of a server that is away the lines that are here count
                raise
        paths = folder.glob(f"{handle['name']}*.log")
        return sorted(paths, key=lambda path: path.stat().st_mtime)

    def fetch(self, handle: Handle, /) -> None:
        settings, run = _settings(handle), RunDirectory(Path(handle["run_directory"]))
        placement = make_placement(run.path, settings)
        marker = run.engine_files / FETCHED_FILE
        if placement.is_shared or marker.exists():
            return
        client = self._client(settings)
        observation = self._observe(handle)
        is_over = read_status(handle, observation).is_over
        if not is_over and not any(is_ready(pod) for pod in observation.pods):
            return  # it waits, so nothing is new
        with _files(client, settings, run, handle["kind"]) as files:
            files.fetch(run)
        if is_over:
            marker.touch()

    def checkpoint_advice(self, handle: Handle, /) -> str | None:
        settings, run = _settings(handle), Path(handle["run_directory"])
        placement = make_placement(run, settings)
        if placement.is_shared or placement.store:
            return None
        return (
            f"kubectl cp POD:{placement.folder}/checkpoints {run}/checkpoints (a pod with {settings.volume})"
        )

    def cancel(self, handle: Handle, *, is_immediate: bool) -> None:
        mark_cancelled(handle, "")
        self._delete(handle, is_immediate=is_immediate)

    def resize(
        self, handle: Handle, submission: Submission, nodes: int, /, *, may_shrink: bool = True
    ) -> Handle:
        jobs = list(handle["jobs"])
        missing = nodes - submission.min_nodes - len(jobs) + 1
        if missing == 0 or (missing < 0 and not may_shrink):
            return handle  # the Jobs themselves make lost pods again
        client = self._client(_settings(handle))
        first = client.get(_api_kind(handle["kind"]), handle["name"])
        if first is None:
            raise WanmaError("the run has ended", "the same `wanma train` command resumes it", EXIT_USAGE)
        if missing > 0:
            return self._join(handle, submission, first, missing)
        for name in jobs[missing:]:  # its pod leaves the run in order
            for kind in (_api_kind(handle["kind"]), "PodGroup"):
                client.delete(kind, name)
        return {**handle, "jobs": jobs[:missing]}

    def _join(self, handle: Handle, submission: Submission, first: Manifest, count: int) -> Handle:
        """Create further objects of one pod each, which join the run; return the new handle."""
        names = [f"{handle['name']}-{int(handle['newest']) + number}" for number in range(1, count + 1)]
        client = self._client(_settings(handle))
        for name in names:
            _create(client, render_manifests(submission, handle["kind"], joining=name), owner=first)
        newest = int(handle["newest"]) + count
        return {**handle, "jobs": [*handle["jobs"], *names], "newest": newest}

    def discard(self, handle: Handle, /) -> None:
        run = RunDirectory(Path(handle["run_directory"]))
        settings = _settings(handle)
        placement = make_placement(run.path, settings)
        self._delete(handle, is_immediate=True)
        if not placement.is_shared:
            with _files(self._client(settings), settings, run, handle["kind"]) as files:
                files.remove(run)

    def explain(self, handle: Handle, /) -> Explanation:
        observation = self._observe(handle)
        status = read_status(handle, observation)
        if status.state != "pending":
            return Explanation(f"the run does not wait: it is {status.state}", (status.reason,))
        section = ClusterSection.model_validate({"kubernetes": handle["settings"]})
        try:
            return explain_wait(handle, observation, self.discover(section))
        except WanmaError as error:  # what would start is unknown
            explanation = explain_wait(handle, observation)
            return replace(explanation, advice=(*explanation.advice, error.message))

    def shell_command(self, handle: Handle, node: str | None, minutes: float | None, /) -> list[str]:
        pods = [pod for pod in self._observe(handle).pods if is_ready(pod)]
        chosen = [pod for pod in pods if node in (None, *pod_names([pod]))]
        if not chosen:
            names = ", ".join(pod_names(pods)) or "none"
            raise WanmaError(f"the run has no running pod {node or ''}", f"running: {names}", EXIT_USAGE)
        settings = _settings(handle)
        options = ["--context", settings.context] if settings.context is not None else []
        options += ["--namespace", handle["namespace"], "--container", CONTAINER]
        shell = [*limit_time(minutes, settings.python), "sh"]
        return ["kubectl", "exec", "-it", *options, chosen[0]["metadata"]["name"], "--", *shell]

    def _client(self, settings: KubernetesSection) -> KubernetesClient:
        key = settings.context, settings.namespace
        if key not in self._clients:
            self._clients[key] = KubernetesClient(*key)
        return self._clients[key]

    def _kind(self, settings: KubernetesSection) -> str:
        """Return the kind of the run's objects."""
        if settings.resource == "trainjob":
            raise JobError(
                "cluster.kubernetes.resource = 'trainjob' is for `wanma render` alone",
                "remove it, or apply the rendered file with `kubectl apply`",
            )
        if settings.resource != "auto":
            return settings.resource
        return "jobset" if self._client(settings).has_kind("JobSet") else "job"

    def _check(self, client: KubernetesClient, submission: Submission) -> None:
        """Refuse a submission that could never start. Raises `WanmaError`."""
        settings = submission.settings.kubernetes
        place = f"in the namespace {client.namespace}"
        if store := make_placement(submission.run_directory, settings).store:
            check_store(store)
        if settings.volume is not None:
            _check_claim(client, settings.volume, submission.nodes, place)
        if settings.scheduler == "volcano" and not client.has_kind("PodGroup"):
            raise JobError(
                "cluster.kubernetes.scheduler = 'volcano': the cluster has no PodGroups of Volcano",
                "remove it, or have Volcano installed",
            )
        queue = settings.kueue_queue
        if queue is not None and client.get("LocalQueue", queue) is None:
            raise JobError(
                f"cluster.kubernetes.queue = '{queue}': there is no such LocalQueue {place}",
                "`kubectl get localqueues` lists them",
            )

    def _observe(self, handle: Handle) -> Observation:
        settings = _settings(handle)
        client = self._client(settings)
        first = client.get(_api_kind(handle["kind"]), handle["name"])
        if first is None:
            return Observation(None)
        selector = f"{RUN_LABEL}={handle['name']}"
        pods = client.list("Pod", selector)
        is_waiting = sum(map(is_ready, pods)) < handle["min_nodes"]
        events: list[Manifest] = []
        workloads: list[Manifest] = []
        gangs: list[Manifest] = []
        if is_waiting:
            if settings.scheduler == "volcano":
                gangs = client.list("PodGroup", selector)
            events = [
                event
                for event in client.list("Event")
                if str(event.get("involvedObject", {}).get("name", "")).startswith(handle["name"])
            ]
            if settings.kueue_queue is not None:
                uid = first["metadata"]["uid"]
                workloads = [
                    entry
                    for entry in client.list("Workload")
                    if any(owner["uid"] == uid for owner in entry["metadata"].get("ownerReferences", []))
                ]
        return Observation(first, pods, events, workloads, gangs)

    def _delete(self, handle: Handle, *, is_immediate: bool) -> None:
        """Delete what the run was started by, which owns all else; pods save and end in time, or at once."""
        client = self._client(_settings(handle))
        client.delete(_api_kind(handle["kind"]), handle["name"])
        if is_immediate:
            for pod in client.list("Pod", f"{RUN_LABEL}={handle['name']}"):
                client.delete("Pod", pod["metadata"]["name"], grace_seconds=0)


def _start_deadline(run: RunDirectory, seconds: float) -> None:
    """Start the process that withdraws the run if it still waits by then; it outlives this one."""
    subprocess.Popen(
        [sys.executable, "-P", "-m", "wanma.engines.kubernetes.deadline", str(run.path), f"{seconds + 1}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _check_claim(client: KubernetesClient, volume: str, nodes: int, place: str) -> None:
    claim = client.get("PersistentVolumeClaim", volume)
    if claim is None:
        raise JobError(
            f"cluster.kubernetes.volume = '{volume}': there is no such claim {place}",
            "`kubectl get pvc` lists them; cluster.kubernetes.namespace chooses another namespace",
        )
    modes = claim.get("spec", {}).get("accessModes", [])
    if nodes > 1 and "ReadWriteMany" not in modes:
        raise JobError(
            f"cluster.kubernetes.volume = '{volume}' is for one node ({', '.join(modes)})",
            "name a claim with access mode ReadWriteMany, or use one node",
        )


def _files(
    client: KubernetesClient, settings: KubernetesSection, run: RunDirectory, kind: str
) -> AbstractContextManager[Volume | ObjectStore]:
    """Return the files of a run on its volume or in its object store."""
    placement = make_placement(run.path, settings)
    if placement.store:
        return nullcontext(ObjectStore(placement.store, first_host(placement, kind), run))
    return Volume(client, settings, placement)


def _create(
    client: KubernetesClient, manifests: Sequence[Manifest], owner: Manifest | None = None
) -> Manifest:
    """Create objects of a run, and return the last one; on failure none is left.

    Args:
        client: client of the API server.
        manifests: the objects, of which the last one owns the others.
        owner: object that owns all of them; None: the last one has no owner.

    Raises:
        WanmaError: the server refuses one.
    """
    token, created = secrets.token_hex(8), []
    try:
        for manifest in manifests:
            created.append((manifest["kind"], manifest["metadata"]["name"]))
            made = client.create(manifest, token)
        metadata = (owner or made)["metadata"]
        reference = {key: (owner or made)[key] for key in ("apiVersion", "kind")}
        reference |= {key: metadata[key] for key in ("name", "uid")}
        for kind, name in created if owner is not None else created[:-1]:
            client.patch(kind, name, {"metadata": {"ownerReferences": [reference]}})
        return made
    except BaseException:
        for kind, name in created:
            client.delete(kind, name)
        raise


def _settings(handle: Handle) -> KubernetesSection:
    return KubernetesSection.model_validate(handle["settings"])


def _api_kind(kind: str) -> str:
    return "JobSet" if kind == "jobset" else "Job"
