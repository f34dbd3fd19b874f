"""Section `[checkpoint]` of a job file: content, schedule and retention of checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Gt, Le
from pydantic import Field, model_validator

from wanma.job.sections.base import Section
from wanma.job.url_credentials import CREDENTIALS_HINT, has_credentials


class CheckpointSection(Section):
    """Checkpoints: schedule, retention, upload, and the state from which a run starts."""

    every_steps: int = Field(
        100, ge=0, le=1_000_000_000_000, description="steps between checkpoints on disk; 0: only at the end"
    )
    full_every: int = Field(
        1,
        ge=1,
        le=1_000_000,
        description="every N-th checkpoint of a run is written in full; those between write the changed rows "
        "alone of tables that train.embedding_optimizer updates",
    )
    keep: int = Field(3, ge=1, le=1_000_000, description="newest checkpoints kept")
    keep_best: bool = Field(True, description="also keep the checkpoint with the best validation metric")
    best_metric: str = Field("loss", description="keep_best: name of the validation metric that decides")
    best_mode: Literal["min", "max"] = Field(
        "min", description="keep_best: direction in which the metric is better"
    )
    in_memory_every_steps: Literal["auto", "off"] | Annotated[int, Gt(0), Le(1_000_000_000_000)] = Field(
        "auto",
        description="steps between in-memory checkpoints, for recovery; auto: at most 1 % of the time",
    )
    partner: Literal["auto"] | bool = Field(
        "auto",
        description="send in-memory checkpoints to a partner node, against loss of a node; auto: with "
        "several nodes",
    )
    compare_replicas: bool = Field(
        True,
        description="compare the replicas' state across ranks before each checkpoint, in memory or on disk",
    )
    keep_every_steps: int = Field(
        0,
        ge=0,
        le=1_000_000_000_000,
        description="also keep checkpoints at multiples of this number of steps; 0: none",
    )
    upload: str | None = Field(
        None,
        description="fsspec URL, e.g. 's3://bucket/run', to which each checkpoint is copied in the "
        "background",
    )
    upload_keep: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="newest uploaded checkpoints kept, beside keep_best and keep_every_steps; 0: all",
    )
    resume: Literal["changed"] | bool = Field(
        True,
        description="resume from the newest complete checkpoint: the run directory's, else `upload`'s; "
        "changed: also as another run, where the model, the data, their order, the loss or the optimization "
        "has changed",
    )
    start_from: str | None = Field(
        None, description="folder whose weights start a new run: a checkpoint, or published safetensors"
    )
    start_optimizer: bool = Field(
        False,
        description="start_from: also take over the state of that checkpoint's optimizer; steps and samples "
        "count from zero",
    )

    @model_validator(mode="after")
    def _check_start(self) -> CheckpointSection:
        if self.start_optimizer and self.start_from is None:
            raise ValueError("start_optimizer has no effect without start_from")
        return self

    @model_validator(mode="after")
    def _check_no_credentials(self) -> CheckpointSection:
        if self.upload is not None and has_credentials(self.upload):  # not repeated in the message
            raise ValueError(
                f"upload contains credentials or a query, which records would show; {CREDENTIALS_HINT}"
            )
        return self
