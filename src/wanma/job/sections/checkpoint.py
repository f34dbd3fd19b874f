"""`[checkpoint]` of a job file."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Gt, Le
from pydantic import Field, model_validator

from wanma.job.sections.base import Section
from wanma.job.url_credentials import WHERE_CREDENTIALS_GO, has_credentials


class CheckpointSection(Section):
    """What is saved, when, and what a run starts from."""

    every_steps: int = Field(100, ge=0, le=1_000_000_000_000, description="0: only at the end")
    keep: int = Field(3, ge=1, le=1_000_000, description="newest checkpoints kept")
    keep_best: bool = Field(True, description="also keep the one with the best metric of validation")
    best_metric: str = Field("loss", description="keep_best: the metric of validation that counts")
    best_mode: Literal["min", "max"] = Field("min", description="keep_best: lower or higher is better")
    snapshots: Literal["auto", "off"] | Annotated[int, Gt(0), Le(1_000_000_000_000)] = Field(
        "auto", description="steps between copies in memory, for recovery; auto: cost at most 1 % of the time"
    )
    partner: Literal["auto"] | bool = Field(
        "auto", description="also copy those to another node, against its loss; auto: with several nodes"
    )
    compare_replicas: bool = Field(
        True, description="before each copy in memory or on disk, ranks compare what they should hold alike"
    )
    keep_every_steps: int = Field(
        0,
        ge=0,
        le=1_000_000_000_000,
        description="also keep those of every multiple of so many steps; 0: none",
    )
    upload: str | None = Field(
        None, description="fsspec URL, e.g. 's3://bucket/run': a copy of each goes there in the background"
    )
    upload_keep: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="newest uploaded ones kept, beside those of the two rules above; 0: all",
    )
    resume: Literal["changed"] | bool = Field(
        True,
        description="carry on from the newest whole checkpoint: the run directory's, else `upload`'s; "
        "changed: also where the code of the model, the data or the loss is another by now",
    )
    start_from: str | None = Field(
        None, description="folder whose weights start a new run: a checkpoint, or published safetensors"
    )

    @model_validator(mode="after")
    def _no_secrets(self) -> CheckpointSection:
        if self.upload is not None and has_credentials(self.upload):  # not repeated in the message
            raise ValueError(
                f"upload holds credentials or a query, which would be kept and shown; {WHERE_CREDENTIALS_GO}"
            )
        return self
