"""Section `[servers]` of a job file: parameter servers that hold the model instead of its replicas."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from wanma.job.sections.base import Section

ServerMode = Literal["synchronous", "bounded", "asynchronous"]


class ServersSection(Section):
    """Parameter servers, which hold the parameters and the optimizer for all workers."""

    count: int = Field(
        0, ge=0, le=1_024, description="server processes, which share all parameters by rows; 0: no servers"
    )
    mode: ServerMode = Field(
        "synchronous",
        description="synchronous: workers share each global batch, same numbers as one process; "
        "asynchronous: each worker takes global batches of its own and waits for no other; bounded: the "
        "same, with at most `staleness` updates between a worker's read and its update. The last two need "
        "parallel.allow = ['staleness']",
    )
    staleness: int | None = Field(
        None,
        ge=0,
        le=1_000_000,
        description="bounded: most updates of other workers between a worker's read and its update; "
        "default: 4",
    )
    replicas: Literal[1, 2] = Field(
        1,
        description="servers that hold each shard; 2: an update is acknowledged when both have it, so that "
        "no killed server loses one",
    )
    compression: Literal["none", "bf16", "fp16"] = Field(
        "none", description="rounding of the gradients that workers push; changes the numbers"
    )

    @model_validator(mode="after")
    def _check_combination(self) -> ServersSection:
        if self.count == 0 and self.model_fields_set - {"count"}:
            raise ValueError(f"{sorted(self.model_fields_set - {'count'})[0]} has no effect without count")
        if self.count and self.replicas > self.count:
            raise ValueError(f"replicas = {self.replicas} needs count of at least {self.replicas}")
        if self.staleness is not None and self.mode != "bounded":
            raise ValueError("staleness has an effect only with mode = 'bounded'")
        return self
