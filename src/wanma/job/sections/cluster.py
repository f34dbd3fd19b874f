"""Section `[cluster]` of a job file: nodes, devices, rendezvous, timeouts and recovery."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, model_validator

from wanma.job.sections.base import Section
from wanma.job.sections.engines import EngineName, RaySection, SlurmSection, SshSection
from wanma.job.sections.kubernetes import KubernetesSection
from wanma.job.url_credentials import CREDENTIALS_HINT, has_credentials


class BudgetSection(Section):
    """Limits of a run over all its starts, which ends in order before it passes one; time of its shells."""

    hours: float | None = Field(
        None, gt=0, le=1e7, description="hours of training, without the pauses between its starts"
    )
    device_hours: float | None = Field(
        None, gt=0, le=1e12, description="the same, times the devices: GPUs, or processes on CPUs"
    )
    money: float | None = Field(
        None, gt=0, le=1e12, description="price of its nodes, by price_per_hour of the cluster file"
    )
    kwh: float | None = Field(
        None, gt=0, le=1e12, description="energy of its nodes at full load, by their power in the cluster"
    )
    idle_minutes: float | None = Field(
        None, gt=0, le=1e6, description="minutes without work after which the devices are given back"
    )
    idle_utilization: float = Field(
        0.05, gt=0, lt=1, description="utilization of the devices of node 0 below which they do no work"
    )
    shell_minutes: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="minutes after which a `wanma shell` ends, with all that it has started",
    )


class ClusterSection(Section):
    """Nodes, devices, rendezvous, timeouts and recovery of the run."""

    engine: EngineName = Field(
        "local",
        description="place of the run: this machine, hosts reached by ssh, a Slurm, Kubernetes or Ray "
        "cluster",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="device type; auto: cuda when present")
    file: str | None = Field(
        None,
        description="cluster file, or a line such as '8x8 H100 SXM, 4x100G'; default: the detected hardware",
    )
    nodes: int = Field(
        1,
        ge=1,
        le=1_000_000,
        description="number of nodes; each runs the same command; '2..8': at least 2, at most 8",
    )
    min_nodes: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="minimum number of nodes to start or continue with, as in nodes = '2..8'; default: all",
    )
    node_rank: int | None = Field(
        None, ge=0, le=1_000_000, description="rank of this node; default: by topology address, then arrival"
    )
    rendezvous: str | None = Field(None, description="rendezvous address HOST:PORT, on one of the nodes")
    claims: str | None = Field(
        None,
        description="folder, or URL in an object store (s3, gs, abfs), of this run alone, where coordinators "
        "claim the run; for nodes that share no run directory; default: the run directory",
    )
    network_interface: str | None = Field(
        None, description="network interface of collectives; default: by route"
    )
    topology_address: str | None = Field(
        None,
        description="network position of this node, outermost first: 'rack-3/switch-1'; near nodes get "
        "adjacent ranks; default: the cluster file's hosts, or Slurm's topology",
    )
    threads_per_rank: int | None = Field(
        None, gt=0, le=4_096, description="CPU threads per rank; default: cores / ranks"
    )
    scratch: str | None = Field(
        None,
        description="folder on each node for what lies on disk while a run lasts (parallel.offload_*, "
        "embedding_memory_bytes); default: in the run directory",
    )
    host_allocator: Literal["tuned", "system"] = Field(
        "tuned", description="settings of the host memory allocator in the workers"
    )
    start_timeout_seconds: float = Field(
        300.0, ge=0.1, le=31_536_000, description="timeout in seconds from launch to the first step"
    )
    last_call_timeout_seconds: float = Field(
        30.0,
        ge=0,
        le=31_536_000,
        description="min_nodes: seconds that the start waits for more nodes",
    )
    hang_timeout_seconds: float = Field(
        300.0, ge=0.1, le=31_536_000, description="timeout in seconds from one step to the next"
    )
    max_restarts: int = Field(
        3,
        ge=0,
        le=1_000_000,
        description="maximum restarts after failures without a new step between them; 0: no restart",
    )
    health_check: Literal["auto", "always", "never"] = Field(
        "auto",
        description="check of devices and links before ranks start; auto: on several nodes, or after a "
        "failure",
    )
    straggler_factor: float = Field(
        1.5,
        gt=1,
        le=1_000_000,
        description="straggler threshold: ratio of a rank's work time to the median of its peers",
    )
    grace_seconds: float = Field(
        30.0,
        ge=0.1,
        le=31_536_000,
        description="seconds from SIGTERM to SIGKILL; the final checkpoint must finish within them",
    )
    requeue_exit_code: int = Field(
        143,
        ge=1,
        le=255,
        description="exit code after SIGTERM, SIGUSR1 or SIGHUP, for schedulers that requeue by exit code",
    )
    code_snapshot: bool = Field(
        True,
        description="submitted runs: use the user's code as it was at the submission; false: as it is in the "
        "working directory when they start",
    )
    environment: str | None = Field(
        None,
        description="submitted runs: lock file (requirements.txt, pylock.toml, uv.lock) from which each node "
        "makes a virtual environment once; default: the interpreter of the engine",
    )
    system_site_packages: bool = Field(
        False,
        description="environment: packages of the interpreter count, too, as venv has it",
    )
    budget: BudgetSection = Field(default_factory=BudgetSection, description="limits of what the run may use")
    ssh: SshSection = Field(default_factory=SshSection, description="settings of engine = 'ssh'")
    slurm: SlurmSection = Field(default_factory=SlurmSection, description="settings of engine = 'slurm'")
    kubernetes: KubernetesSection = Field(
        default_factory=KubernetesSection, description="settings of engine = 'kubernetes'"
    )
    ray: RaySection = Field(default_factory=RaySection, description="settings of engine = 'ray'")

    @model_validator(mode="before")
    @classmethod
    def _expand_node_range(cls, value: Any) -> Any:
        """Replace nodes = '2..8' by nodes = 8 and min_nodes = 2."""
        nodes = value.get("nodes") if isinstance(value, dict) else None
        if (
            not isinstance(nodes, str)
            or (match := re.fullmatch(r"\s*(\d+)\s*\.\.\s*(\d+)\s*", nodes)) is None
        ):
            return value
        return {**value, "min_nodes": int(match[1]), "nodes": int(match[2])}

    @model_validator(mode="after")
    def _check_components(self) -> ClusterSection:
        components = self.slurm.components if self.engine == "slurm" else []
        if not components:
            return self
        count = sum(component.nodes for component in components)
        if self.nodes != count:
            raise ValueError(
                f"slurm.components have {count} nodes in all, so nodes = {count} (given: {self.nodes})"
            )
        if self.min_nodes is not None and self.min_nodes < self.nodes:
            raise ValueError(
                "a run with slurm.components has a fixed number of nodes: set nodes, and no range"
            )
        return self

    @model_validator(mode="after")
    def _check_nodes_and_rendezvous(self) -> ClusterSection:
        if self.min_nodes is not None and self.min_nodes > self.nodes:
            raise ValueError(
                f"nodes as a range must rise, as '2..8' (given: '{self.min_nodes}..{self.nodes}')"
            )
        if self.node_rank is not None and self.node_rank >= self.nodes:
            raise ValueError(f"node_rank must be 0 to nodes - 1 = {self.nodes - 1} (given: {self.node_rank})")
        if self.environment is not None and self.slurm.container is not None:
            raise ValueError(
                "environment and slurm.container are both set: an image has its packages; remove one"
            )
        if self.environment is not None and self.engine == "kubernetes":
            raise ValueError(
                "environment is set: an image has its packages; remove it, or choose another image"
            )
        if self.claims is not None and has_credentials(self.claims):  # not repeated in the message
            raise ValueError(
                f"claims contains credentials or a query, which records would show; {CREDENTIALS_HINT}"
            )
        if self.rendezvous is not None:
            host, _, port = self.rendezvous.rpartition(":")
            if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
                raise ValueError(
                    f"rendezvous must be HOST:PORT, e.g. '10.0.0.1:29500' (given: '{self.rendezvous}')"
                )
        return self
