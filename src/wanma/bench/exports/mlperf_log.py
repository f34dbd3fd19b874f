"""MLPerf training log of a measurement: lines of `:::MLLOG` and JSON, as mlperf_logging 4.1 checks them.

MLPerf measures the time to a target quality, so the log needs validations. It exists for the benchmarks of
ruleset 6.1.0 whose models wanma trains; the rules are those of `compliance_checker/training_6.1.0`. The lines
have the settings of the run; where one differs from the closed division, the checker says so. A log that the
checker cannot accept, whatever its settings, is refused (`OPEN_LOSS_LIMITS`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from wanma.bench.measurements.measurement import Measurement
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.report.run_report import Report

RULESET = "6.1.0"
TARGETS = {"llama31_8b": 3.3, "gpt_oss_20b": 3.34, "llama2_70b_lora": 0.925}
"""Validation loss that ends a run, by benchmark, in the closed division."""
OPEN_LOSS_LIMITS = {"llama31_8b": 1.0}
"""Validation loss below which the checker accepts a log of the open division.

It is a placeholder of mlperf_logging 4.1.68 ("TODO: Update with official compliance requirements"), far below
what a run of this model reaches."""
SCHEDULES = {
    "cosine": "cosine with linear warmup",
    "linear": "linear with linear warmup",
    "constant": "constant",
}
PRECISIONS = {"fp64": "fp64", "fp32": "fp32", "bf16": "bfloat16", "fp16": "fp16"}
"""Names of the ruleset by precision of a plan."""
COMPRESSED_PRECISIONS = (("int8", "int8"), ("fp16", "fp16"), ("bf16", "bfloat16"))
"""Names by method of compression, lowest first; other methods send fewer values and keep their precision."""
START, END, POINT = "INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME"


@dataclass(frozen=True)
class Submission:
    """Facts of a submission that no measurement has."""

    organization: str
    platform: str
    """Name of the system; its description is a file of the submission."""
    benchmark: str
    """Name by the ruleset: one of `TARGETS`."""
    division: Literal["closed", "open"] = "open"
    status: Literal["cloud", "onprem", "preview", "research"] = "onprem"
    target_loss: float | None = None
    """Validation loss that ends the run; None: that of the benchmark."""
    config_file: str = "job.toml"
    """File of the submission with the settings."""
    caches_cleared: bool = False
    """True if the caches of the operating system were cleared before the measurement."""


@dataclass(frozen=True)
class ValidationRecord:
    """Validation of a run."""

    step: int
    """Optimizer step after which it ran."""
    ended: float
    """Unix time."""
    seconds: float
    loss: float


@dataclass(frozen=True)
class SampleCounts:
    """Sizes of the data."""

    train: int
    """Samples of the training set."""
    validation: int
    """Samples of one validation."""


def mlperf_log(
    measurement: Measurement,
    validations: Sequence[ValidationRecord],
    job: Job,
    samples: SampleCounts,
    submission: Submission,
    plan: Plan,
) -> str:
    """Return the log of a measurement.

    Args:
        measurement: a measurement with the step times of a run.
        validations: validations of the run, in their order.
        job: job of the run, for the hyperparameters.
        samples: sizes of the data.
        submission: organisation, platform and benchmark.
        plan: plan of the run.

    Raises:
        WanmaError: the benchmark is none of the ruleset, the measurement has no step or no validation, or the
            checker accepts no such log.
    """
    _check(measurement, validations, submission)
    lines = [
        *_setup(measurement, job, samples, submission, plan),
        *_training(measurement, validations, job, submission),
    ]
    return "".join(f":::MLLOG {json.dumps(line)}\n" for line in lines)


def read_validations(report: Report) -> list[ValidationRecord]:
    """Return the validations of a run whose loss is finite; their seconds are a phase of their step."""
    phases = report.steps.get("phases.validation", [])
    seconds = dict(zip(report.steps["step"], phases, strict=False))
    return [
        ValidationRecord(event["step"], event["time"], seconds.get(event["step"], 0.0), event["loss"])
        for event in report.validations
        if event["loss"] is not None and math.isfinite(event["loss"])
    ]


def _check(measurement: Measurement, validations: Sequence[ValidationRecord], submission: Submission) -> None:
    if submission.benchmark not in TARGETS:
        raise WanmaError(
            f"'{submission.benchmark}' is no benchmark of MLPerf training {RULESET} that wanma logs",
            f"one of {', '.join(TARGETS)}",
            EXIT_USAGE,
        )
    if measurement.turns is not None:
        raise WanmaError(
            f"'{measurement.contender}' was measured in turns, and an MLPerf log has the wall clock",
            "measure it without --turns",
            EXIT_USAGE,
        )
    if not measurement.steps:
        raise WanmaError(f"'{measurement.contender}' has no steps: an MLPerf log needs them")
    if not validations:
        raise WanmaError(
            f"'{measurement.contender}' has no validation: MLPerf measures the time to a validation loss",
            "set train.validate_every_steps",
            EXIT_USAGE,
        )
    limit = _open_limit(submission)
    lowest = min(validation.loss for validation in _until_target(validations, submission))
    if limit is not None and lowest >= limit:
        raise WanmaError(
            f"MLPerf's checker accepts {submission.benchmark} in the open division only with a validation "
            f"loss below {limit:g}, a placeholder of its rules; the lowest here is {lowest:.4g}",
            "write the log for the closed division: --division closed",
            EXIT_USAGE,
        )


def _open_limit(submission: Submission) -> float | None:
    return OPEN_LOSS_LIMITS.get(submission.benchmark) if submission.division == "open" else None


def _target(submission: Submission) -> float:
    """Return the validation loss at or below which a run ends."""
    if submission.target_loss is not None:
        return submission.target_loss
    limit = _open_limit(submission)
    return TARGETS[submission.benchmark] if limit is None else math.nextafter(limit, 0.0)


def _until_target(
    validations: Sequence[ValidationRecord], submission: Submission
) -> Sequence[ValidationRecord]:
    """Return the validations up to the first that reaches the target; all if none does."""
    target = _target(submission)
    reached = next((row for row, one in enumerate(validations) if one.loss <= target), len(validations))
    return validations[: reached + 1]


def _setup(
    measurement: Measurement,
    job: Job,
    samples: SampleCounts,
    submission: Submission,
    plan: Plan,
) -> Iterator[dict[str, Any]]:
    """Yield the lines from the start of the command to the first read of training data."""
    began, run_began = measurement.started, _run_start(measurement)
    yield _line(began, POINT, "cache_clear", submission.caches_cleared)
    yield _line(began, START, "init_start")
    for key, value in (
        ("submission_benchmark", submission.benchmark),
        ("submission_division", submission.division),
        ("submission_org", submission.organization),
        ("submission_platform", submission.platform),
        ("submission_status", submission.status),
        ("config_filename", submission.config_file),
        *_hyperparameters(job, submission.benchmark),
        *_plan_keys(plan, job),
        ("train_samples", samples.train),
        ("eval_samples", samples.validation),
    ):
        yield _line(began, POINT, key, value)
    yield _line(run_began, END, "init_stop")
    yield _line(run_began, START, "run_start")


def _hyperparameters(job: Job, benchmark: str) -> Iterable[tuple[str, Any]]:
    """Yield the keys that the closed division checks, with the values of the job.

    A learning rate decays from the end of the warm-up to the last step.
    """
    train = job.train
    yield "seed", train.seed
    yield "global_batch_size", train.global_batch
    yield "max_sequence_length", job.data.sequence_length
    yield "max_steps", train.steps
    yield "opt_name", train.optimizer_factory or train.optimizer
    yield "opt_base_learning_rate", train.learning_rate
    yield "opt_end_learning_rate", train.learning_rate * train.final_learning_rate_share
    yield "opt_learning_rate_warmup_steps", train.warmup_steps
    yield "opt_learning_rate_decay_steps", train.steps - train.warmup_steps
    yield "opt_learning_rate_training_steps", train.steps
    yield "opt_learning_rate_decay_schedule", train.schedule_factory or SCHEDULES[train.schedule]
    yield "opt_gradient_clip_norm", train.gradient_clip
    if train.optimizer == "adamw" and train.optimizer_factory is None:
        yield "opt_adamw_beta_1", train.betas[0]
        yield "opt_adamw_beta_2", train.betas[1]
        yield "opt_adamw_epsilon", train.epsilon
        yield "opt_adamw_weight_decay", train.weight_decay
    if benchmark == "llama2_70b_lora":
        yield "lora_rank", job.model.lora_rank
        yield "lora_alpha", job.model.lora_alpha


def _plan_keys(plan: Plan, job: Job) -> Iterable[tuple[str, Any]]:
    """Yield the keys that disclose precision and parallelism."""
    precision = PRECISIONS[plan.precision]
    yield "gradient_accumulation_steps", plan.gradient_accumulation_steps(job.train.global_batch)
    yield "micro_batch_size", plan.micro_batch
    yield "tensor_parallelism", plan.tp
    yield "pipeline_parallelism", plan.pp
    yield "context_parallelism", plan.cp
    yield "expert_parallelism", plan.ep
    yield "lowest_numerical_precision_in_linear", "fp8" if plan.fp8 else precision
    yield "lowest_numerical_precision_in_attn", precision
    yield "lowest_numerical_precision_in_comm", _communication_precision(plan)


def _communication_precision(plan: Plan) -> str:
    """Return the lowest precision of a message: of compressed gradients, else of activations."""
    methods = {*plan.compression_methods}
    if plan.synchronization is not None:
        methods.add(plan.synchronization.compression)
    return next(
        (name for method, name in COMPRESSED_PRECISIONS if method in methods), PRECISIONS[plan.precision]
    )


def _training(
    measurement: Measurement, validations: Sequence[ValidationRecord], job: Job, submission: Submission
) -> Iterator[dict[str, Any]]:
    """Yield a block of training for each validation, until the target is reached, and the end of the run."""
    counts = _sample_counts(measurement, job.train.global_batch)
    began, sample_count = _run_start(measurement), 0
    logged = _until_target(validations, submission)
    for validation in logged:
        start = {"samples_count": sample_count}
        validation_began = validation.ended - validation.seconds
        sample_count = counts.get(validation.step, validation.step * job.train.global_batch)
        end = {"samples_count": sample_count}
        yield _line(began, START, "block_start", None, start)
        yield _line(validation_began, END, "block_stop", None, start)
        yield _line(validation_began, START, "eval_start", None, end)
        yield _line(validation.ended, POINT, "eval_accuracy", validation.loss, end)
        yield _line(validation.ended, END, "eval_stop", None, end)
        began = validation.ended
    is_reached = logged[-1].loss <= _target(submission)
    status = "success" if is_reached else "aborted"
    ended = began if is_reached else max(began, measurement.steps[-1].time)
    yield _line(ended, END, "run_stop", None, {"status": status, "samples_count": sample_count})


def _run_start(measurement: Measurement) -> float:
    """Return the Unix time at which the first step began; the time of a step includes no validation."""
    first = measurement.steps[0]
    return first.time - first.seconds - first.phases.get("validation", 0.0)


def _sample_counts(measurement: Measurement, global_batch: int) -> dict[int, int]:
    """Return the samples since the start by step; those of a step that is recorded twice count once."""
    total, counts = 0, {}
    for step in {step.step: step for step in measurement.steps}.values():
        total = step.step * global_batch if step.samples is None else total + round(step.samples)
        counts[step.step] = total
    return counts


def _line(
    time: float, event: str, key: str, value: Any = None, metadata: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "namespace": "",
        "time_ms": round(1000 * time),
        "event_type": event,
        "key": key,
        "value": value,
        "metadata": metadata or {},
    }
