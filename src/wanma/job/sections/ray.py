"""Sub-section `[cluster.ray]`: settings of engine = 'ray'."""

from __future__ import annotations

from pydantic import Field, PositiveFloat

from wanma.job.sections.base import Section


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
