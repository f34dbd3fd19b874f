"""Sub-section `[cluster.ray]`: settings of engine = 'ray'."""

from __future__ import annotations

import re

from pydantic import Field, model_validator

from wanma.job.sections.base import Section

_ADDRESS = re.compile(r"auto|[\w.-]+:\d+|\[[0-9a-fA-F:]+\]:\d+")


class RaySection(Section):
    """Placement by Ray, whose nodes all see the folder of the run; the size is that of `[cluster]`."""

    address: str = Field(
        "auto",
        description="HOST:PORT of the Ray cluster's head node; auto: RAY_ADDRESS, or the cluster of this machine",
    )
    resources: dict[str, float] = Field(
        default_factory=dict,
        description="resources of Ray that each node must have beside CPU and GPU, e.g. "
        "{'accelerator_type:H100' = 0.001}",
    )
    folder: str = Field(
        "~/.wanma", description="folder that all nodes see, for environments (cluster.environment)"
    )
    image: str | None = Field(
        None, description="image with Ray and wanma for the RayJob of KubeRay that --dry-run prints"
    )
    volume: str | None = Field(
        None,
        description="PersistentVolumeClaim (ReadWriteMany) of that RayJob, mounted where the working directory is",
    )

    @model_validator(mode="after")
    def _check(self) -> RaySection:
        if not _ADDRESS.fullmatch(self.address):
            raise ValueError(
                f"address must be 'auto' or HOST:PORT of the head node (given: '{self.address}'); from outside of "
                "the cluster give the command by `ray job submit`"
            )
        if (wrong := next((name for name in self.resources if name in ("CPU", "GPU")), None)) is not None:
            raise ValueError(f"resources must not contain {wrong}, which follows from the plan")
        if any(not 0 < value < float("inf") for value in self.resources.values()):
            raise ValueError("resources must be numbers above 0")
        return self
