"""Sub-sections of `[cluster]` for the engines that need settings of their own."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, PositiveFloat, model_validator

from wanma.job.sections.base import Section

ENGINES = ("local", "ssh", "slurm", "kubernetes", "ray")
EngineName = Literal["local", "ssh", "slurm", "kubernetes", "ray"]

_SLURM_ARRAY = re.compile(r"(--arr|-a)")
"""Options of sbatch that make a job array, abbreviated or not; --account and the like go on otherwise."""
_SLURM_TIME = re.compile(r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}|UNLIMITED|INFINITE")


class SlurmComponentSection(Section):
    """Nodes of one kind in a heterogeneous job of Slurm."""

    nodes: int = Field(ge=1, le=1_000_000, description="number of nodes")
    constraint: str | None = Field(None, description="features that these nodes must have")
    partition: str | None = Field(None, description="their partition; default: that of the job")
    gres: str | None = Field(None, description="generic resources of each of these nodes")


class SlurmSection(Section):
    """Submission to Slurm; the size is that of `[cluster]`."""

    partition: str | None = Field(None, description="partition; default: that of the cluster")
    account: str | None = Field(None, description="account that is charged")
    qos: str | None = Field(None, description="quality of service")
    reservation: str | None = Field(None, description="reservation")
    folder: str = Field(
        "~/.wanma", description="folder that all nodes see, for environments (cluster.environment)"
    )
    constraint: str | None = Field(None, description="features that the nodes must have, e.g. 'h100&nvme'")
    prefer: str | None = Field(
        None,
        description="features of nodes that come first, and others if those are not free, e.g. "
        "'h100&nvme&dataset'; needs Slurm 22.05, and the features of `constraint` among them",
    )
    gres: str | None = Field(
        None, description="generic resources of a node, e.g. 'gpu:h100:8'; default: the GPUs of the plan"
    )
    time: str | None = Field(
        None,
        description="time limit, e.g. '2-00:00:00' or '90' (minutes); the run continues in a further job "
        "after it; default: the partition's",
    )
    components: list[SlurmComponentSection] = Field(
        default_factory=list,
        description="nodes of several kinds, in the order of node ranks, as one heterogeneous job",
    )
    exclusive: bool = Field(True, description="whole nodes, shared with no other job")
    nodelist: str | None = Field(None, description="hosts that must be used, e.g. 'n[1-4]'")
    exclude: str | None = Field(None, description="hosts that must not be used")
    signal_seconds: int = Field(
        120,
        ge=1,
        le=65_535,
        description="seconds before the time limit at which the run saves and leaves; Slurm may be up to 60 "
        "seconds early",
    )
    container: str | None = Field(None, description="image in which the ranks run; needs container_runtime")
    container_runtime: Literal["pyxis", "apptainer"] | None = Field(
        None, description="runtime of the container: the Pyxis plugin of srun, or Apptainer"
    )
    setup: list[str] = Field(
        default_factory=list,
        description="shell lines on the job's first node before the start; all nodes get their variables, "
        "e.g. 'module load cuda'",
    )
    options: list[str] = Field(
        default_factory=list, description="further options of sbatch, e.g. '--mail-type=END'"
    )

    @model_validator(mode="after")
    def _check_options(self) -> SlurmSection:
        if self.time is not None and not _SLURM_TIME.fullmatch(self.time):
            raise ValueError(
                f"time must be minutes, HH:MM:SS or D-HH:MM:SS, as for sbatch --time (given: '{self.time}')"
            )
        if self.components and (self.nodelist or self.constraint or self.prefer):
            raise ValueError(
                "components have constraints of their own: set none of constraint, prefer and nodelist"
            )
        if self.prefer is not None and (self.constraint or "") not in self.prefer:
            raise ValueError(
                f"prefer takes the place of constraint where it can, so it must hold it: "
                f"'{self.constraint}&{self.prefer}'"
            )
        if (self.container is None) != (self.container_runtime is None):
            raise ValueError("container and container_runtime belong together: set both, or none")
        if array := next((option for option in self.options if _SLURM_ARRAY.match(option)), None):
            raise ValueError(
                f"options must not make a job array, as a run is one job (given: '{array}'); submit several "
                "runs with names of their own: observe.name"
            )
        components = {
            f"components[{number}].{name}": value
            for number, component in enumerate(self.components)
            for name, value in component.model_dump().items()
        }
        for name, value in {**self.model_dump(), **components}.items():
            texts = value if isinstance(value, list) else [value]
            if name != "setup" and any(set(text) & set("\n\r\0") for text in texts if isinstance(text, str)):
                raise ValueError(f"{name} must be one line, as it becomes an option of sbatch")
        return self


class SshSection(Section):
    """Start on hosts that are reached by `ssh`, with the settings of `ssh_config`."""

    hosts: list[str] = Field(
        default_factory=list, description="hosts, as ssh knows them, e.g. 'me@gpu1:2222'"
    )
    inventory: str | None = Field(
        None, description="file of hosts: one a line, or an inventory of Ansible in INI form"
    )
    python: str = Field(
        "python3",
        min_length=1,
        description="interpreter on the hosts, with wanma and torch unless cluster.environment is set",
    )
    folder: str = Field(
        "~/.wanma", description="folder on each host for code, environments and run directories"
    )
    options: list[str] = Field(
        default_factory=list, description="further options of ssh, e.g. '-oConnectTimeout=5'"
    )

    @model_validator(mode="after")
    def _check_one_line(self) -> SshSection:
        for name, value in self.model_dump().items():
            texts = value if isinstance(value, list) else [value]
            if any(set(text) & set("\n\r\0") for text in texts if isinstance(text, str)):
                raise ValueError(f"{name} must be one line, as it is given to ssh")
        return self


class RaySection(Section):
    """Placement by Ray, whose nodes all see the folder of the run; the size is that of `[cluster]`."""

    address: str = Field(
        "auto",
        pattern=r"^(auto|[\w.-]+:\d+|\[[0-9a-fA-F:]+\]:\d+)$",
        description="address HOST:PORT of the Ray cluster's head node; auto: RAY_ADDRESS, or the cluster of "
        "this machine; from outside of the cluster use `ray job submit`",
    )
    resources: dict[str, PositiveFloat] = Field(
        default_factory=dict,
        description="resources of Ray that each node must have beside CPU and GPU, e.g. "
        "{'accelerator_type:H100' = 0.001}",
    )
    folder: str = Field(
        "~/.wanma", description="folder that all nodes see, for environments (cluster.environment)"
    )
    image: str | None = Field(
        None, description="image with Ray and wanma, for the RayJob of KubeRay that --dry-run then prints"
    )
    volume: str | None = Field(
        None,
        description="claim (ReadWriteMany) of that RayJob's volume, mounted where the working directory is",
    )
