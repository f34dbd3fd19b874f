"""Manifests of a run: JobSet, Indexed Job with a headless Service, or TrainJob; plain dictionaries and YAML.

Sources: kubernetes.io/docs/concepts/workloads/controllers/job (Indexed Jobs, pod failure policy),
jobset.sigs.k8s.io/docs/concepts, kueue.sigs.k8s.io/docs/tasks/run/jobs, kubeflow.org trainer v1alpha1,
volcano.sh/en/docs/podgroup (and volcano-sh/apis pkg/apis/scheduling/v1beta1/labels.go for the annotation).
"""

from __future__ import annotations

import hashlib
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wanma.elastic.launch_config import NODE_NAME_VARIABLE
from wanma.elastic.protocol.shared_secret import SECRET_VARIABLE
from wanma.engines.engine import CODE_ARCHIVE_VARIABLE, PLACED_BY_VARIABLE, Submission
from wanma.job.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, JobError, missing_extra_error
from wanma.job.file.import_path import CODE_FOLDER_VARIABLE
from wanma.job.sections.kubernetes import KubernetesSection

Manifest = dict[str, Any]
"""Object of the Kubernetes API, as JSON has it."""

RUN_LABEL = "wanma.dev/run"
"""Label of every object of a run; its value is the name of the first one."""
FILES_LABEL = "wanma.dev/files"
"""Label of a short-lived pod for the files of a run; its value is as of `RUN_LABEL`."""
MANAGER_LABEL = "app.kubernetes.io/managed-by"
TOKEN_ANNOTATION = "wanma.dev/submission"
"""Annotation by which a submission recognizes an object that it has created before an answer was lost."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
KUEUE_PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
GANG_ANNOTATION = "scheduling.k8s.io/group-name"
"""Annotation of a pod by which Volcano knows its PodGroup."""
CONTAINER, CODE_CONTAINER, JOB_OF_SET = "wanma", "code", "node"
SECRET_KEY = "secret"
CODE_MOUNT = "/run/wanma/code"
FILES_POD_SECONDS = 900
"""Time, in seconds, after which Kubernetes ends a pod for files that nobody has removed."""
EXIT_MARGIN_SECONDS = 15
"""Time, in seconds, beyond the grace period that a pod has to end."""
UNREACHABLE_SECONDS = 30
"""Time, in seconds, after which the pod of a node without an answer is given up."""
KEPT_SECONDS = 604_800
"""Time, in seconds, for which Kubernetes keeps the objects of a run that has ended."""
MAX_PREFERRED_HOSTS = 64
"""Largest number of nodes that a pod names as preferred: each is a term of the object."""
UNNAMED_USER_ENVIRONMENT = {"HOME": "/tmp", "USER": "wanma"}
"""Environment of processes whose user has no entry in the image."""


@dataclass(frozen=True)
class Placement:
    """Names and folders of a run on the cluster."""

    name: str
    """Name of the run's first object; of further ones it is the beginning."""
    folder: str
    """Run directory in the pods."""
    is_shared: bool
    """True if that is the run directory of this machine, too."""
    store: str = ""
    """URL of the run in an object store; empty: it is on a volume."""


def make_placement(run_directory: Path, settings: KubernetesSection) -> Placement:
    """Return names and folders of a run; the same run directory always has the same."""
    is_shared = settings.store is None and run_directory.is_relative_to(settings.mount_path)
    origin = f"{'' if is_shared else socket.gethostname()}:{run_directory}"
    words = re.sub(r"[^a-z0-9]+", "-", run_directory.name.lower()).strip("-")[:24].strip("-")
    name = "-".join(["wanma", *([words] if words else []), hashlib.sha256(origin.encode()).hexdigest()[:8]])
    folder = str(run_directory) if is_shared else f"{settings.mount_path}/runs/{run_directory.name}"
    store = f"{settings.store.rstrip('/')}/{name}" if settings.store is not None else ""
    return Placement(name, folder, is_shared, store)


def first_host(placement: Placement, kind: str) -> str:
    """Return the host name of a run's first pod; a TrainJob makes a JobSet."""
    return f"{placement.name}-0" if kind == "job" else f"{placement.name}-{JOB_OF_SET}-0-0"


def check_settings(submission: Submission, kind: str) -> None:
    """Refuse settings without which no pod can run. Raises `JobError`."""
    settings = submission.settings.kubernetes
    if settings.image is None:
        raise JobError(
            "cluster.kubernetes.image is not set",
            "name an image with wanma and torch; docs/guides/image.md shows how one is made",
        )
    if settings.volume is None and settings.store is None:
        raise JobError(
            "neither cluster.kubernetes.volume nor cluster.kubernetes.store is set",
            "name a PersistentVolumeClaim with access mode ReadWriteMany, or a URL in an object store",
        )
    if settings.scheduler == "volcano" and kind == "trainjob":
        raise JobError(
            "cluster.kubernetes.scheduler = 'volcano' is not possible with a TrainJob",
            "remove it: the runtime of a TrainJob has a podGroupPolicy",
        )
    if settings.store is not None and (kind == "trainjob" or not submission.job_text):
        subject = "a TrainJob, which has no init container" if kind == "trainjob" else "a script"
        raise JobError(
            f"cluster.kubernetes.store is set, and not possible with {subject}",
            "set cluster.kubernetes.volume instead",
        )


def render_manifests(submission: Submission, kind: str, *, joining: str = "") -> list[Manifest]:
    """Return the objects of a run in the order in which they are created, without its Secret.

    Args:
        submission: supervisors to place.
        kind: "jobset", "job" or "trainjob".
        joining: name of a further object, whose pod joins the run; empty: the first one is rendered, with
            the pods that the run needs at least.

    Raises:
        JobError: a setting is missing.
    """
    settings = submission.settings.kubernetes
    check_settings(submission, kind)
    placement = make_placement(submission.run_directory, settings)
    name = joining or placement.name
    host = f"{first_host(placement, kind)}.{placement.name}"
    port = 20_000 + int(hashlib.sha256(placement.name.encode()).hexdigest()[:8], 16) % 10_000
    rendezvous = f"{host}:{port}" if submission.nodes > 1 else ""
    pod = _pod_spec(submission, placement, rendezvous, unpacks=kind != "trainjob")
    metadata = _metadata(submission, placement, name)
    if kind == "trainjob":
        return [_train_job(submission, pod, metadata)]
    pods = 1 if joining else submission.min_nodes
    job = _job_spec(submission, pods, pod, placement)
    gang = []
    if settings.scheduler == "volcano":
        pod["schedulerName"] = "volcano"
        job["template"]["metadata"]["annotations"] = {GANG_ANNOTATION: name}
        gang.append(_pod_group(settings, pods, metadata))
    if kind == "jobset":
        spec: Manifest = {
            "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
            "replicatedJobs": [{"name": JOB_OF_SET, "replicas": 1, "template": {"spec": job}}],
            "failurePolicy": {"maxRestarts": 0},
            "ttlSecondsAfterFinished": KEPT_SECONDS,
        }
        if settings.kueue_queue is not None:
            spec["suspend"] = True
        return [*gang, _object("jobset.x-k8s.io/v1alpha2", "JobSet", metadata, spec=spec)]
    job["ttlSecondsAfterFinished"] = KEPT_SECONDS
    if settings.kueue_queue is not None:
        job["suspend"] = True
    pod["subdomain"] = placement.name
    service = {
        "clusterIP": "None",
        "selector": {RUN_LABEL: placement.name},
        "publishNotReadyAddresses": True,
        "ports": [{"name": "rendezvous", "port": port}],
    }
    jobs = [*gang, _object("batch/v1", "Job", metadata, spec=job)]
    if joining:
        return jobs
    place = _metadata(submission, placement, name, is_queued=False)
    return [_object("v1", "Service", place, spec=service), *jobs]


def render_secret(submission: Submission) -> Manifest:
    """Return the Secret of the run, with the shared secret of its supervisors; it is never shown."""
    placement = make_placement(submission.run_directory, submission.settings.kubernetes)
    metadata = _metadata(submission, placement, placement.name, is_queued=False)
    return _object("v1", "Secret", metadata, type="Opaque", stringData={SECRET_KEY: submission.secret})


def read_rbac() -> str:
    """Return the manifests of a ServiceAccount that may submit runs and follow them."""
    return Path(__file__).with_name("rbac.yaml").read_text(encoding="utf-8")


def to_yaml(manifests: list[Manifest]) -> str:
    """Return manifests as one YAML file. Raises `WanmaError` without its package."""
    try:
        import yaml
    except ImportError:
        raise missing_extra_error("pyyaml", "kubernetes", "YAML") from None

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  # equal parts are written out
            return True

    texts = (yaml.dump(manifest, Dumper=Dumper, sort_keys=False, width=1000) for manifest in manifests)
    return "---\n".join(texts)


def _pod_spec(submission: Submission, placement: Placement, rendezvous: str, *, unpacks: bool) -> Manifest:
    """Return the pod of one supervisor; a pod that cannot have an init container unpacks the code itself."""
    settings = submission.settings.kubernetes
    grace = int(submission.settings.grace_seconds) + EXIT_MARGIN_SECONDS
    mounts = [
        {"name": "runs", "mountPath": settings.mount_path},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    limit = {"sizeLimit": settings.shared_memory} if settings.shared_memory is not None else {}
    volumes = [_run_volume(settings), {"name": "shm", "emptyDir": {"medium": "Memory", **limit}}]
    for number, path in enumerate(dict.fromkeys(settings.host_paths)):
        mounts.append({"name": f"host-{number}", "mountPath": path})
        volumes.append({"name": f"host-{number}", "hostPath": {"path": path, "type": "DirectoryOrCreate"}})
    environment = dict(submission.environment)
    is_visible = settings.store is None and submission.folder.is_relative_to(settings.mount_path)
    working_folder = str(submission.folder) if is_visible else settings.mount_path
    secured, starters = _security(settings), []
    module = [settings.python, "-P", "-m"]
    archive = f"{placement.folder}/code/{submission.code.name}" if submission.code is not None else ""
    preparation = ["wanma.engines.kubernetes.object_store", placement.store, placement.folder]
    preparation = preparation if placement.store else ["wanma.engines.code.unpack"]
    if submission.code is not None and unpacks:
        mounts.append({"name": "code", "mountPath": CODE_MOUNT})
        volumes.append({"name": "code", "emptyDir": {}})
        environment[CODE_FOLDER_VARIABLE] = f"{CODE_MOUNT}/snapshots/{submission.code.stem}"
        working_folder = working_folder if is_visible else environment[CODE_FOLDER_VARIABLE]
        preparation += [archive, f"{CODE_MOUNT}/snapshots"]
    elif archive:
        environment[CODE_ARCHIVE_VARIABLE] = archive
    if unpacks and (archive or placement.store):
        starters.append(
            {
                "name": CODE_CONTAINER,
                "image": settings.image,
                "command": [*module, *preparation],
                **({"env": _environment(settings, placement, environment)} if placement.store else {}),
                "volumeMounts": [mount for mount in mounts if mount["name"] in ("runs", "code")],
                "resources": _resources(replace(submission, gpus_per_node=0)),  # a quota asks for them
                **secured,
            }
        )
    if settings.run_as_user is not None:
        environment = {**UNNAMED_USER_ENVIRONMENT, **environment}
    entry = [*module, "wanma.engines.kubernetes.pod", "--run", placement.folder]
    entry += ["--rendezvous", rendezvous, "--seconds", f"{submission.settings.start_timeout_seconds:g}"]
    entry += ["--claims", submission.settings.claims] if submission.settings.claims else []
    entry += ["--store", placement.store] if placement.store else []
    container = {
        "name": CONTAINER,
        "image": settings.image,
        "command": [*entry, "--", *command_words(submission, placement)],
        "workingDir": working_folder,
        "env": _environment(settings, placement, environment),
        "resources": _resources(submission),
        "volumeMounts": mounts,
        **secured,
    }
    selector = dict(settings.node_selector)
    if settings.gpu_product is not None:
        selector["nvidia.com/gpu.product"] = settings.gpu_product
    return {
        **_base_pod(settings, grace, volumes),
        "enableServiceLinks": False,
        **({"nodeSelector": selector} if selector else {}),
        **({"affinity": _preference(submission.preferred_hosts)} if submission.preferred_hosts else {}),
        **({"initContainers": starters} if starters else {}),
        "containers": [container],
    }


def _preference(hosts: Sequence[str]) -> Manifest:
    """Return the affinity of a pod that prefers nodes by their names, and takes others as well."""
    terms = [
        {"key": "metadata.name", "operator": "In", "values": [host]} for host in hosts[:MAX_PREFERRED_HOSTS]
    ]
    preferred = [{"weight": 100, "preference": {"matchFields": [term]}} for term in terms]
    return {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def render_files_pod(name: str, settings: KubernetesSection, placement: Placement) -> Manifest:
    """Return a pod that has the volume of a run, and waits for programs that read and write its files."""
    container = {
        "name": CONTAINER,
        "image": settings.image,
        "command": [settings.python, "-c", f"import time; time.sleep({FILES_POD_SECONDS})"],
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}},
        "volumeMounts": [{"name": "runs", "mountPath": settings.mount_path}],
        **_security(settings),
    }
    spec = {
        **_base_pod(settings, 0, [_run_volume(settings)]),
        "activeDeadlineSeconds": FILES_POD_SECONDS,
        "containers": [container],
    }
    labels = {FILES_LABEL: placement.name, MANAGER_LABEL: "wanma"}
    return _object("v1", "Pod", {"name": name, "labels": labels}, spec=spec)


def _run_volume(settings: KubernetesSection) -> Manifest:
    if settings.store is not None:
        return {"name": "runs", "emptyDir": {}}
    return {"name": "runs", "persistentVolumeClaim": {"claimName": settings.volume}}


def _base_pod(settings: KubernetesSection, grace_seconds: int, volumes: list[Manifest]) -> Manifest:
    """Return the parts of a pod that all pods of a run have in common."""
    spec: Manifest = {
        "restartPolicy": "Never",  # the Job makes a new pod, which finds the run by its claims
        "terminationGracePeriodSeconds": grace_seconds,
        "automountServiceAccountToken": False,
        "tolerations": _tolerations(settings),
        "volumes": volumes,
    }
    given = {
        "imagePullSecrets": [{"name": name} for name in settings.image_pull_secrets],
        "serviceAccountName": settings.service_account,
        "priorityClassName": settings.priority_class if settings.kueue_queue is None else None,
    }
    spec |= {key: value for key, value in given.items() if value}
    if settings.run_as_user is not None:
        number = settings.run_as_user
        spec["securityContext"] = {
            "runAsNonRoot": True,
            "runAsUser": number,
            "runAsGroup": number,
            "fsGroup": number,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
    return spec


def _security(settings: KubernetesSection) -> Manifest:
    """Return the rights of a container; those of one that is not root satisfy the profile `restricted`."""
    rights: Manifest = {"allowPrivilegeEscalation": False}
    if settings.run_as_user is not None:
        rights["capabilities"] = {"drop": ["ALL"]}
    return {"securityContext": rights}


def command_words(submission: Submission, placement: Placement) -> list[str]:
    """Return the arguments of `wanma` in a pod, with paths as they are there.

    Those in the working directory are relative, as unpacked code is the working directory.
    """
    own, folder = str(submission.run_directory), f"{submission.folder}/"
    return [
        placement.folder + word.removeprefix(own)
        if word == own or word.startswith(f"{own}/")
        else word.removeprefix(folder)
        for word in submission.command
    ]


def _environment(settings: KubernetesSection, placement: Placement, plain: dict[str, str]) -> list[Manifest]:
    references = {SECRET_VARIABLE: f"{placement.name}/{SECRET_KEY}", **settings.secret_environment}
    environment: list[Manifest] = [{"name": PLACED_BY_VARIABLE, "value": "kubernetes"}]
    environment += [
        # `$(NAME)` would be replaced by another variable.
        {"name": name, "value": value.replace("$(", "$$(")}
        for name, value in sorted(plain.items())
    ]
    node_name = {"fieldRef": {"fieldPath": "spec.nodeName"}}
    environment.append({"name": NODE_NAME_VARIABLE, "valueFrom": node_name})
    for variable, reference in references.items():
        name, _, key = reference.partition("/")
        environment.append({"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}})
    return environment


def _resources(submission: Submission) -> Manifest:
    """Return requests and limits of a pod; processor time beyond the request may be used where it is idle."""
    settings = submission.settings.kubernetes
    requests = {"cpu": settings.cpu or str(submission.cores_per_node)}
    limits = {}
    if settings.memory is not None:
        requests["memory"] = limits["memory"] = settings.memory
    if submission.gpus_per_node:
        requests[settings.gpu_resource] = limits[settings.gpu_resource] = str(submission.gpus_per_node)
    return {"requests": requests, **({"limits": limits} if limits else {})}


def _tolerations(settings: KubernetesSection) -> list[Manifest]:
    tolerations: list[Manifest] = []
    for text in settings.tolerations:
        taint, _, effect = text.partition(":")
        key, mark, value = taint.partition("=")
        toleration = {"key": key, "operator": "Equal" if mark else "Exists"}
        toleration |= {"value": value} if mark else {}
        tolerations.append(toleration | ({"effect": effect} if effect else {}))
    for condition in ("not-ready", "unreachable"):
        tolerations.append(
            {
                "key": f"node.kubernetes.io/{condition}",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": UNREACHABLE_SECONDS,
            }
        )
    return tolerations


def _job_spec(submission: Submission, nodes: int, pod: Manifest, placement: Placement) -> Manifest:
    """Return an Indexed Job that makes each pod anew which was evicted or lost; a failed run ends it."""
    ended = [EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED]
    stopped = submission.settings.requeue_exit_code
    rules: list[Manifest] = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    for action, codes in (
        ("Ignore", [stopped] if stopped not in ended else []),  # by the eviction of another pod
        ("FailJob", ended),
    ):
        if codes:
            condition = {"containerName": CONTAINER, "operator": "In", "values": codes}
            rules.append({"action": action, "onExitCodes": condition})
    labels = {RUN_LABEL: placement.name, MANAGER_LABEL: "wanma"}
    return {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": submission.settings.max_restarts * nodes,
        "podReplacementPolicy": "Failed",  # two pods of one index would both join
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }


def _pod_group(settings: KubernetesSection, pods: int, metadata: Manifest) -> Manifest:
    """Return the gang of an object's pods, which Volcano starts together."""
    given = {"queue": settings.queue, "priorityClassName": settings.priority_class}
    spec = {"minMember": pods, **{key: value for key, value in given.items() if value}}
    return _object("scheduling.volcano.sh/v1beta1", "PodGroup", metadata, spec=spec)


def _train_job(submission: Submission, pod: Manifest, metadata: Manifest) -> Manifest:
    """Return a TrainJob; what its trainer cannot say is a patch of the runtime's pod template."""
    (container,) = pod.pop("containers")
    resources = container.pop("resources")
    trainer = {
        "image": container["image"],
        "command": container["command"],
        "numNodes": submission.nodes,
        "numProcPerNode": 1,  # one supervisor, which starts the ranks
        "resourcesPerNode": resources,
        "env": container["env"],
    }
    patched = {"name": "node", "volumeMounts": container["volumeMounts"]}
    known = ["nodeSelector", "tolerations", "volumes", "imagePullSecrets", "securityContext"]
    known += ["serviceAccountName", "terminationGracePeriodSeconds"]
    patch = {name: pod[name] for name in known if name in pod}
    template = {"spec": {**patch, "containers": [patched]}}
    job = {"name": JOB_OF_SET, "template": {"spec": {"template": template}}}
    runtime = {"template": {"spec": {"replicatedJobs": [job]}}}
    return _object(
        "trainer.kubeflow.org/v1alpha1",
        "TrainJob",
        metadata,
        spec={
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": trainer,
            "runtimePatches": [{"manager": "wanma.dev/render", "trainingRuntimeSpec": runtime}],
            **({"suspend": True} if submission.settings.kubernetes.kueue_queue else {}),
        },
    )


def _metadata(submission: Submission, placement: Placement, name: str, *, is_queued: bool = True) -> Manifest:
    settings = submission.settings.kubernetes
    labels = {RUN_LABEL: placement.name, MANAGER_LABEL: "wanma"}
    if settings.kueue_queue is not None and is_queued:
        labels[QUEUE_LABEL] = settings.kueue_queue
        if settings.priority_class is not None:
            labels[KUEUE_PRIORITY_LABEL] = settings.priority_class
    place = {"namespace": settings.namespace} if settings.namespace is not None else {}
    return {"name": name, **place, "labels": labels}


def _object(version: str, kind: str, metadata: Manifest, **fields: Any) -> Manifest:
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}
