"""Job: all sections of a job file, each typed in a file of its own in this folder; no behavior.

`wanma job` prints their content. Cross-field rules that need only the job are validators of the sections;
rules that need the nodes or the model belong to the planner.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from wanma.job.sections.base import Section
from wanma.job.sections.checkpoint import CheckpointSection
from wanma.job.sections.cluster import ClusterSection
from wanma.job.sections.data import DataSection
from wanma.job.sections.model import ModelSection
from wanma.job.sections.observe import ObserveSection
from wanma.job.sections.parallel import ParallelSection, ServersSection
from wanma.job.sections.train import TrainSection


def _expand_auto(value: Any) -> Any:
    return {"auto": True} if value == "auto" else value


class Job(Section):
    """Validated job: all sections of a job file."""

    model: ModelSection
    data: DataSection = Field(default_factory=DataSection)
    train: TrainSection = Field(default_factory=TrainSection)
    parallel: Annotated[ParallelSection, BeforeValidator(_expand_auto)] = Field(
        default_factory=ParallelSection
    )
    servers: ServersSection = Field(default_factory=ServersSection)
    cluster: ClusterSection = Field(default_factory=ClusterSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    observe: ObserveSection = Field(default_factory=ObserveSection)
