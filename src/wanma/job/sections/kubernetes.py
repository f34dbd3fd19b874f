"""Sub-section `[cluster.kubernetes]`: settings of engine = 'kubernetes'."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, model_validator

from wanma.job.sections.base import Section
from wanma.job.url_credentials import CREDENTIALS_HINT, has_credentials

_TOLERATION = re.compile(r"[\w./-]+(=[\w.-]*)?(:(NoSchedule|PreferNoSchedule|NoExecute))?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]|[KMGTPE]i)?")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_SECRET_KEY = re.compile(r"[a-z0-9.-]+/[\w.-]+")


class KubernetesSection(Section):
    """Submission to Kubernetes; the size is that of `[cluster]`."""

    namespace: str | None = Field(None, description="namespace; default: that of the context")
    context: str | None = Field(None, description="context of the kubeconfig; default: the current one")
    image: str | None = Field(None, description="image with wanma and torch; it must be set")
    image_pull_secrets: list[str] = Field(
        default_factory=list, description="names of Secrets for the registry of the image"
    )
    python: str = Field("python3", min_length=1, description="interpreter in the image")
    resource: Literal["auto", "jobset", "job", "trainjob"] = Field(
        "auto",
        description="kind of the object: a JobSet, an Indexed Job with a headless Service, or, by `wanma "
        "render` alone, a TrainJob of Kubeflow; auto: a JobSet where the cluster has that kind",
    )
    scheduler: Literal["default", "volcano"] = Field(
        "default",
        description="scheduler of the pods; volcano: they start as a gang, all or none, by a PodGroup of "
        "Volcano",
    )
    queue: str | None = Field(
        None,
        description="LocalQueue of Kueue, which starts the run when its quota has room; with scheduler = "
        "'volcano' a Queue of Volcano",
    )
    priority_class: str | None = Field(
        None, description="PriorityClass of the pods; with a LocalQueue Kueue's own"
    )
    volume: str | None = Field(
        None,
        description="PersistentVolumeClaim (ReadWriteMany) of run directories, code and data; it, or store, "
        "must be set",
    )
    store: str | None = Field(
        None,
        pattern=r"^[a-z][a-z0-9+.-]*://.+",
        description="URL in an object store in place of a volume, e.g. 's3://bucket/runs', for code, records "
        "and checkpoints; each pod has a run directory of its own",
    )
    mount_path: str = Field(
        "/wanma",
        pattern=r"^(/[\w.-]+)+$",
        description="folder of the volume in the pods, with runs/NAME below; run directories below the same "
        "folder on this machine are used as they are",
    )
    host_paths: list[str] = Field(
        default_factory=list,
        description="folders of the nodes (hostPath) that the pods have at the same path, such as that of "
        "data.cache, or of data in parts; made if they are missing",
    )
    gpu_resource: str = Field(
        "nvidia.com/gpu",
        description="resource of one device, e.g. 'nvidia.com/mig-1g.10gb' for a MIG profile",
    )
    gpu_product: str | None = Field(
        None, description="value of the node label nvidia.com/gpu.product that the nodes must have"
    )
    node_selector: dict[str, str] = Field(default_factory=dict, description="labels that the nodes must have")
    tolerations: list[str] = Field(
        default_factory=list,
        description="taints to tolerate, as kubectl writes them: KEY, KEY=VALUE or KEY=VALUE:EFFECT",
    )
    cpu: str | None = Field(
        None, description="CPU request of a pod, e.g. '16'; default: the cores of the plan"
    )
    memory: str | None = Field(
        None, description="memory request and limit of a pod, e.g. '200Gi'; default: none"
    )
    shared_memory: str | None = Field(
        None, description="limit of /dev/shm, e.g. '16Gi'; default: half of the node's memory"
    )
    run_as_user: int | None = Field(
        None,
        ge=1,
        le=2**31 - 1,
        description="user and group number of the processes, not root; default: the image's",
    )
    service_account: str | None = Field(
        None, description="ServiceAccount of the pods, which get no token of it; default: the namespace's"
    )
    secret_environment: dict[str, str] = Field(
        default_factory=dict,
        description="environment variables from Secrets of the namespace: NAME = 'secret/key'",
    )
    wait_seconds: float | None = Field(
        None,
        gt=0,
        le=31_536_000,
        description="longest wait in seconds for nodes, after which the run is withdrawn with the reason, by "
        "a process on this machine; default: no limit",
    )

    @property
    def kueue_queue(self) -> str | None:
        """LocalQueue of Kueue; None: Kueue does not manage the run."""
        return self.queue if self.scheduler == "default" else None

    @model_validator(mode="after")
    def _check_forms(self) -> KubernetesSection:
        for name in ("cpu", "memory", "shared_memory"):
            value = getattr(self, name)
            if value is not None and not _QUANTITY.fullmatch(value):
                raise ValueError(f"{name} must be a quantity, e.g. '16' or '200Gi' (given: '{value}')")
        for name in ("namespace", "queue", "priority_class", "volume", "service_account"):
            value = getattr(self, name)
            if value is not None and not _NAME.fullmatch(value):
                raise ValueError(f"{name} must be a name: small letters, digits, dashes (given: '{value}')")
        if self.store is not None and self.volume is not None:
            raise ValueError("volume and store both keep the files of the run: set one of them")
        if self.store is not None and has_credentials(self.store):  # not repeated in the message
            raise ValueError(
                f"store contains credentials or a query, which records would show; {CREDENTIALS_HINT}"
            )
        for path in self.host_paths:
            if not path.startswith("/") or ".." in path.split("/"):
                raise ValueError(f"host_paths are absolute paths without '..' (given: '{path}')")
        for text in self.tolerations:
            if not _TOLERATION.fullmatch(text):
                raise ValueError(f"tolerations are KEY, KEY=VALUE or KEY=VALUE:EFFECT (given: '{text}')")
        for variable, text in self.secret_environment.items():
            if not _SECRET_KEY.fullmatch(text):
                raise ValueError(f"secret_environment.{variable} must be 'secret/key' (given: '{text}')")
        return self
