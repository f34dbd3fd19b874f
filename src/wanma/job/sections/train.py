"""Section `[train]` of a job file: steps, batch, precision, optimizer and validation."""

from __future__ import annotations

import itertools
from typing import Any, Literal

from pydantic import Field, model_validator

from wanma.job.sections.base import Section

Precision = Literal["fp64", "fp32", "bf16", "fp16"]


class ParameterGroupSection(Section):
    """Parameters, selected by name, with their own learning rate or weight decay, or frozen."""

    match: str = Field(description="shell pattern on the full parameter name, e.g. 'layers.0.*'")
    learning_rate_scale: float = Field(1.0, ge=0, le=1_000_000, description="factor on the learning rate")
    weight_decay: float | None = Field(
        None, ge=0, le=1_000, description="weight decay of these parameters, instead of train.weight_decay"
    )
    frozen: bool = Field(False, description="exclude these parameters from training")
    muon: bool | None = Field(
        None,
        description="with train.optimizer = 'muon': update by Muon (true) or AdamW (false); default: by role",
    )


class TrainSection(Section):
    """Mathematics of the run; no key here may depend on the hardware."""

    steps: int = Field(300, gt=0, le=1_000_000_000_000, description="optimizer steps of the run")
    global_batch: int = Field(32, gt=0, le=1_000_000_000, description="samples per optimizer step")
    batch_ramp: list[tuple[int, int]] = Field(
        default_factory=list,
        description="[[step, global_batch], ...]: batch size in samples from that step on",
    )
    precision: Precision = Field(
        "fp32", description="compute precision; master weights stay fp32 (fp64: for exact comparisons)"
    )
    fp8: bool = Field(
        False,
        description="run the blocks' matrix products in fp8 (torchao; GPUs from compute capability 8.9 on)",
    )
    optimizer: Literal["adamw", "sgd", "adafactor", "muon"] = Field("adamw", description="optimizer")
    optimizer_factory: str | None = Field(
        None,
        description="'package.module:Class' or function of parameter groups, instead of optimizer: "
        "'torch.optim:RAdam'",
    )
    optimizer_arguments: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of optimizer_factory"
    )
    embedding_optimizer: Literal["sgd", "adagrad", "rowwise_adagrad", "adam"] | None = Field(
        None,
        description="optimizer of the embedding tables that parallel.embedding places or parameter servers "
        "hold; it changes only the rows that a step uses",
    )
    learning_rate: float = Field(1e-3, gt=0, le=1_000, description="peak learning rate")
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="decay of the learning rate after warm-up"
    )
    schedule_factory: str | None = Field(
        None,
        description="'package.module:function' (step) or (step, steps) -> share of learning_rate, instead "
        "of schedule",
    )
    warmup_steps: int = Field(
        0, ge=0, le=1_000_000_000_000, description="steps of linear warm-up of the learning rate"
    )
    final_learning_rate_share: float = Field(
        0.1, ge=0, le=1, description="learning rate at the end, as a share of the peak"
    )
    weight_decay: float = Field(
        0.1,
        ge=0,
        le=1_000,
        description="weight decay, decoupled (sgd: coupled); not applied to norms and biases",
    )
    betas: tuple[float, float] = Field(
        (0.9, 0.95), description="decay rates of AdamW's first and second moments"
    )
    epsilon: float = Field(1e-8, gt=0, le=1_000, description="term added to AdamW's denominator")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of SGD and Muon")
    parameter_groups: list[ParameterGroupSection] = Field(
        default_factory=list, description="parameter groups; the first match applies"
    )
    weight_average: float = Field(
        0.0, ge=0, lt=1, description="decay of an exponential moving average of the weights; 0: off"
    )
    gradient_clip: float = Field(
        1.0, ge=0, le=1_000_000_000_000, description="maximum global gradient norm; 0: off"
    )
    non_finite: Literal["stop", "skip", "retry"] = Field(
        "stop",
        description="action on a NaN or infinite gradient, or a step without targets; skip: no update; "
        "retry: restore the newest in-memory checkpoint and repeat the step, once; then as skip",
    )
    spike: Literal["ignore", "stop", "skip", "retry"] = Field(
        "ignore",
        description="action on a loss or gradient norm far above those of the last 64 steps, as for "
        "non_finite",
    )
    spike_deviations: float = Field(
        10.0,
        gt=0,
        le=1_000_000,
        description="distance of a spike in robust standard deviations (from the median absolute deviation)",
    )
    loss_scale: float = Field(16384.0, gt=0, le=2**60, description="fp16: initial loss scale")
    validate_every_steps: int = Field(
        0, ge=0, le=1_000_000_000_000, description="steps between validations; 0: only at the end"
    )
    validation_samples: int = Field(
        256, gt=0, le=1_000_000_000_000, description="samples per validation, fixed by the seed"
    )
    stop_patience: int = Field(
        0,
        ge=0,
        le=1_000_000_000,
        description="validations without improvement after which the run ends (early stopping); 0: never",
    )
    stop_metric: str = Field("loss", description="stop_patience: name of the validation metric that decides")
    stop_mode: Literal["min", "max"] = Field(
        "min", description="stop_patience: direction in which the metric is better"
    )
    stop_min_delta: float = Field(
        0.0,
        ge=0,
        le=1_000_000_000,
        description="stop_patience: least change of the metric that is an improvement",
    )
    metrics: dict[str, str] = Field(
        default_factory=dict,
        description="validation metrics: name = 'package.module:function' (output, targets) -> value per "
        "sample or target, or (sum, count)",
    )
    seed: int = Field(
        1, ge=0, le=2**63 - 1, description="seed of initialization, data order and every random draw"
    )
    deterministic: bool = Field(False, description="make results bitwise repeatable, at some cost in speed")
    check_code: bool = Field(
        True,
        description="refuse objects passed in Python whose modules differ between the program and the ranks, "
        "which import them: patched classes, changed constants, files edited after the import",
    )

    @model_validator(mode="after")
    def _check_ranges(self) -> TrainSection:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be at least 0 and below 1 (given: {list(self.betas)})")
        if any(step < 0 or batch < 1 for step, batch in self.batch_ramp):
            raise ValueError("batch_ramp needs steps of at least 0 and batches of at least 1")
        starts = [step for step, _ in self.batch_ramp]
        if any(later <= earlier for earlier, later in itertools.pairwise(starts)):
            raise ValueError(f"the steps of batch_ramp must rise (given: {starts})")
        if self.stop_patience > 0 and self.validate_every_steps == 0:
            raise ValueError(
                f"stop_patience = {self.stop_patience} needs validations: set validate_every_steps"
            )
        if self.optimizer_factory is not None and "optimizer" in self.model_fields_set:
            raise ValueError("give only one of optimizer and optimizer_factory")
        if self.schedule_factory is not None and "schedule" in self.model_fields_set:
            raise ValueError("give only one of schedule and schedule_factory")
        return self
