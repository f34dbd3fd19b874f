"""Rules of alerts: data, each with its runbook.

A rule is evaluated by the supervisors during every run, and by Prometheus from the file that `wanma observe
render` writes. None may fire in a healthy run: thresholds relate a run to its own forecast and its own past,
and a condition must hold for some time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from wanma.observe.alerts.expressions import (
    Expression,
    age,
    deviation,
    increase,
    longest,
    mean,
    shortest,
    value,
)

MINUTE, HOUR = 60.0, 3600.0


@dataclass(frozen=True)
class Rule:
    """Rule: fires for each series of its condition that has had a value for `for_seconds`."""

    name: str
    """Name of the alert, as Prometheus has it."""
    severity: Literal["warning", "critical"]
    condition: Expression
    summary: str
    """Event in one sentence; `{labels}` names the series, `{value}` is the condition's value."""
    causes: tuple[str, ...]
    """Usual causes, each with where to look or what to change, most frequent first."""
    for_seconds: float = 0.0


def _mean_step(window_seconds: float) -> Expression:
    """Return the mean time of a step in the window."""
    return increase("step_time_seconds", window_seconds) / increase("steps", window_seconds)


# Without the last minute: a loss that has risen would raise its own mean and deviation.
_LOSS_BEFORE = mean("loss", 15 * MINUTE, MINUTE)
_LITTLE_ROOM = (
    "a plan with little room: a smaller parallel.micro_batch, parallel.recompute, or more ranks that share "
    "the states (parallel.shard)"
)
RULES = (
    Rule(
        "TrainingStalled",
        "critical",
        (shortest(value("rank_silent_seconds")) > value("step_seconds") * 10)
        & (shortest(value("rank_silent_seconds")) > 2 * MINUTE)
        & (value("up") > 0),
        "no rank reports progress: {value:.0f} s since the last report, more than ten steps take",
        (
            "a collective that waits for a rank that is gone or in other code: after "
            "cluster.hang_timeout_seconds the run ends the ranks and names rank, line and collective",
            "storage that does not answer: `wanma logs RUN` and the rank's stack show a read or write",
        ),
    ),
    Rule(
        "LossNotFinite",
        "critical",
        increase("non_finite_steps", 10 * MINUTE) > 0,
        "{value:.0f} steps in ten minutes had a NaN or infinite loss or gradient",
        (
            "too high a learning rate, or too short a warm-up: train.learning_rate, train.warmup_steps",
            "a sample with NaN: the message of the step names the samples; data.bad_data = 'skip' leaves "
            "them out",
            "fp16 without room: train.precision = 'bf16'; observe.gradient_norms_every_steps shows the layer",
        ),
    ),
    Rule(
        "LossSpike",
        "warning",
        (value("loss") - _LOSS_BEFORE > deviation("loss", 15 * MINUTE, MINUTE) * 4)
        & (value("loss") > _LOSS_BEFORE * 1.5),
        "the loss is {value:.3g} above its mean of the 15 minutes before",
        (
            "a learning rate that is too high: docs/guides/loss-spikes.md goes back and skips the samples",
            "damaged data: `wanma data inspect` shows the samples of the step",
        ),
        for_seconds=MINUTE / 4,
    ),
    Rule(
        "SlowerThanForecast",
        "warning",
        (_mean_step(5 * MINUTE) / value("forecast_step_upper_seconds")) > 1.5,
        "steps take {value:.1f} times the upper end of the forecast's interval",
        (
            "other programs on the machine, or a throttled device: `wanma diagnose RUN` names the part",
            "rates of the devices that were assumed: `wanma bench machine --save` measures them",
        ),
        for_seconds=5 * MINUTE,
    ),
    Rule(
        "SlowerThanBefore",
        "warning",
        (_mean_step(5 * MINUTE) / _mean_step(HOUR)) > 1.5,
        "steps take {value:.1f} times their mean of the last hour",
        (
            "a straggler: the alert of that name, and the heat map of ranks",
            "a slower store or network: data wait and exposed communication show which",
        ),
        for_seconds=5 * MINUTE,
    ),
    Rule(
        "DataWait",
        "warning",
        increase("phase_seconds", 5 * MINUTE, phase="data") / increase("step_time_seconds", 5 * MINUTE) > 0.1,
        "ranks wait for data {value:.0%} of the time",
        (
            "too few loader workers: data.workers; the report says which part of loading dominates",
            "a store that is too slow: data.cache keeps what was read on the node",
        ),
        for_seconds=5 * MINUTE,
    ),
    Rule(
        "Straggler",
        "warning",
        value("rank_straggler") > 0,
        "{labels} is slower than the ranks with the same work, and all wait for it",
        (
            "another program on its node, a throttled or faulty GPU: the event names node, device and phase",
            "parallel.load_balancing moves work away from it; cluster.straggler_factor says when it is one",
        ),
    ),
    Rule(
        "RankDown",
        "critical",
        (value("rank_up") < 1) & (value("up") > 0),
        "the process of {labels} has ended, and the run has not recovered",
        ("the supervisor restarts ranks up to cluster.max_restarts times; `wanma logs RUN` has the cause",),
        for_seconds=MINUTE,
    ),
    Rule(
        "RestartLoop",
        "critical",
        increase("recoveries", HOUR) > 5,
        "{value:.0f} recoveries within an hour",
        (
            "a failure that comes again: `wanma diagnose RUN` names the first cause of the newest",
            "a node that fails again: exclude it, and let cluster.min_nodes go on without it",
        ),
    ),
    Rule(
        "GpuIdle",
        "warning",
        (mean("gpu_utilization_ratio", 10 * MINUTE) < 0.1)
        & (longest(increase("rank_steps", 10 * MINUTE)) > 0),
        "{labels} computes {value:.0%} of the time",
        ("waits for data or for other ranks: `wanma diagnose RUN`",),
        for_seconds=5 * MINUTE,
    ),
    Rule(
        "GpuThrottled",
        "warning",
        value("gpu_throttled") > 0,
        "heat or a fault of the power supply reduces the clock of {labels}",
        ("cooling or power of that node; the other ranks wait for this one",),
        for_seconds=5 * MINUTE,
    ),
    Rule(
        "GpuMemoryLow",
        "warning",
        (value("gpu_memory_needed_bytes") / value("gpu_memory_bytes")) > 0.95,
        "{labels} needs {value:.1%} of its memory, without what PyTorch only caches",
        (_LITTLE_ROOM, "another program on the GPU: `nvidia-smi` lists them"),
        for_seconds=MINUTE,
    ),
    Rule(
        "GpuMemoryRetries",
        "warning",
        increase("rank_allocation_retries", 10 * MINUTE) > 2,
        "the GPU of {labels} had no room for {value:.0f} allocations in ten minutes until PyTorch had freed "
        "its cache, for which all wait",
        (
            "tensors of changing sizes leave gaps: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            _LITTLE_ROOM,
        ),
    ),
    Rule(
        "GpuMemoryErrors",
        "critical",
        increase("gpu_ecc_errors", HOUR) > 0,
        "{labels} had {value:.0f} memory errors that could not be corrected",
        ("a faulty device: take the node out; checkpoint.compare_replicas tells whether weights differ",),
    ),
    Rule(
        "GpuError",
        "critical",
        value("gpu_xid") > 0,
        "the driver has reported XID {value:.0f} of {labels}",
        (
            "a fault of the device or its links is 48, 64, 74, 79, 94 or 95: take the node out; all numbers: "
            "docs.nvidia.com/deploy/xid-errors",
            "13, 31 and 43 come from a program: a kernel of the model, or of another on this GPU",
        ),
    ),
    Rule(
        "NodeMemoryLow",
        "critical",
        (value("node_memory_available_bytes") / value("node_memory_bytes")) < 0.05,
        "{labels} has {value:.1%} of its memory left",
        (
            "in-memory checkpoints and caches count: checkpoint.in_memory_every_steps, data.cache",
            "a leak, if the memory of a rank grows: rank_memory_bytes; or loader workers: data.workers",
        ),
        for_seconds=MINUTE,
    ),
    Rule(
        "DiskFull",
        "warning",
        (value("node_disk_free_bytes") / value("node_disk_bytes")) < 0.05,
        "the file system of the run has {value:.1%} of its space left on {labels}",
        ("checkpoint.keep keeps fewer checkpoints; checkpoint.upload stores them elsewhere",),
        for_seconds=MINUTE,
    ),
    Rule(
        "NoRoomForCheckpoint",
        "critical",
        (value("node_disk_free_bytes") / value("checkpoint_bytes")) < 1.1,
        "the free space of {labels} is {value:.1f} checkpoints",
        ("the next checkpoint will not fit: free space, or lower checkpoint.keep",),
        for_seconds=MINUTE,
    ),
    Rule(
        "CheckpointTooOld",
        "warning",
        (value("completed_steps") - value("checkpoint_step") > value("checkpoint_interval_steps") * 2.5)
        & (age("checkpoint_timestamp_seconds") > 10 * MINUTE)
        & (value("up") > 0),
        "the newest checkpoint is {value:.0f} steps old, more than twice checkpoint.every_steps",
        (
            "a store that is too slow: checkpoint_write_seconds beside the time between saves",
            "saves that fail: the messages of the run name the cause",
        ),
        for_seconds=MINUTE,
    ),
)
"""All rules, in the order of a page."""


RUN_FAILED = Rule(
    "RunFailed",
    "critical",
    value("up") < 0,
    "the run has failed",
    ("the run's report and logs have the cause; the same command resumes it from the newest checkpoint",),
)
"""Alert of a run that has failed, which its supervisor sends at the end, when no metric is left."""
