"""Catalogue of metrics: the one table of names, units, kinds, labels and meanings.

Names follow the conventions of Prometheus: the prefix `wanma_`, base units, `_total` for counters. The
endpoint, the alert rules, the Grafana dashboards and the page docs/reference/metrics.md are made from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter"]
Group = Literal["system", "framework", "task"]

RUN_LABELS = ("run",)
NODE_LABELS = (*RUN_LABELS, "node")
RANK_LABELS = (*NODE_LABELS, "rank")
GPU_LABELS = (*NODE_LABELS, "gpu")
PREFIX = "wanma"


@dataclass(frozen=True)
class Metric:
    """Metric: one name, with or without several series."""

    name: str
    """Name without the prefix; a counter's without `_total`."""
    kind: Kind
    unit: str
    """Base unit: seconds, bytes, watts, …; ratio: 0 to 1; empty: a number."""
    meaning: str
    labels: tuple[str, ...] = RUN_LABELS
    group: Group = "framework"

    @property
    def family_name(self) -> str:
        """Return the name of the metric, which Prometheus completes for a counter."""
        return f"{PREFIX}_{self.name}"

    @property
    def full_name(self) -> str:
        """Return the name of its series, as a query has it."""
        return "_".join((self.family_name, *(["total"] if self.kind == "counter" else [])))


def _gauge(name: str, unit: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, "gauge", unit, meaning, (*RUN_LABELS, *labels))


def _counter(name: str, unit: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, "counter", unit, meaning, (*RUN_LABELS, *labels))


def _system(name: str, kind: Kind, unit: str, meaning: str, labels: tuple[str, ...]) -> Metric:
    return Metric(name, kind, unit, meaning, labels, "system")


_FRAMEWORK = (
    _gauge("run_info", "", "1; labels: state of the run and its plan in words", "state", "plan"),
    _gauge("up", "", "1 while the run trains, 0 after its end"),
    _gauge("completed_steps", "", "optimizer steps completed"),
    _gauge("target_steps", "", "step at which the run ends"),
    _gauge("loss", "", "mean loss over the targets of the last step, before the update; nats per target"),
    _gauge("learning_rate", "", "learning rate of the last update"),
    _gauge("gradient_norm", "", "global L2 norm of the last gradient before clipping"),
    _gauge("layer_gradient_norm", "", "the same by layer, where it is recorded", "layer"),
    _gauge("expert_load_imbalance", "", "mixtures of experts: maximum tokens of an expert over the mean"),
    _gauge("balance_loss", "", "mixtures of experts: balancing loss per target"),
    _gauge("samples", "", "samples consumed: the position in the data"),
    _gauge("targets_per_second", "", "targets (tokens, or labelled samples) over the time of the last step"),
    _gauge("mfu_ratio", "ratio", "model FLOPs utilization of the last step"),
    _gauge("step_seconds", "seconds", "time of the last step"),
    _gauge("last_step_timestamp_seconds", "seconds", "time at which the last step was recorded, unix"),
    _counter("steps", "", "steps since the supervisor began, repeated ones too, but the first of each start"),
    _counter("step_time_seconds", "seconds", "sum of the times of these steps"),
    _counter("phase_seconds", "seconds", "sum of their times on rank 0 by phase", "phase"),
    _counter("exposed_communication_seconds", "seconds", "exposed communication of rank 0 by kind", "kind"),
    _counter("communication_seconds", "seconds", "communication of rank 0 by kind, exposed or not", "kind"),
    _counter("bubble_seconds", "seconds", "bubble of the pipeline on rank 0"),
    _counter("non_finite_steps", "", "steps with a loss, or but in fp16 a gradient norm, that is not finite"),
    _counter("bad_samples", "", "samples that rank 0 could not read"),
    _gauge("memory_bytes", "bytes", "peak memory of rank 0 so far"),
    _gauge("forecast_step_seconds", "seconds", "forecast of the time of a step"),
    _gauge("forecast_step_upper_seconds", "seconds", "upper end of its 90 % interval"),
    _gauge("forecast_phase_seconds", "seconds", "forecast of the time of a step by kind", "phase"),
    _gauge("forecast_memory_bytes", "bytes", "forecast of the memory of the rank with the most"),
    _gauge("checkpoint_step", "", "step of the newest checkpoint; before the first, that of the start"),
    _gauge("checkpoint_timestamp_seconds", "seconds", "time at which it was committed, unix"),
    _gauge("checkpoint_bytes", "bytes", "its size, of all ranks"),
    _gauge("checkpoint_write_seconds", "seconds", "time of its write in the background"),
    _gauge("checkpoint_interval_steps", "", "steps between two checkpoints, by the job"),
    _counter("checkpoints", "", "checkpoints committed"),
    _counter("checkpoint_stall_seconds", "seconds", "time for which saving stopped the training"),
    _counter("recoveries", "", "failures that did not end the run"),
    _counter("recovery_seconds", "seconds", "time from each failure to the first new step"),
    _counter("repeated_steps", "", "steps that recoveries and resumes repeated"),
    _counter("starts", "", "starts of the run, by the user or its engine"),
    _gauge("start_timestamp_seconds", "seconds", "time of the newest start, unix"),
    _gauge("ranks", "", "ranks of the run by its plan"),
    _gauge(
        "goodput_ratio", "ratio", "time of the steps that count over the time since the run's first start"
    ),
    _gauge("device_seconds", "seconds", "devices times the time since the first start: what was allocated"),
    _gauge("used_device_seconds", "seconds", "devices times the time of the steps that count"),
    _gauge("alert", "", "1 while the alert fires, as the run's own supervisor sees it", "alert", "severity"),
)
_TASK = tuple(
    Metric(metric.name, metric.kind, metric.unit, metric.meaning, metric.labels, "task")
    for metric in (
        _gauge("validation_loss", "", "loss of the newest validation"),
        _gauge("validation_step", "", "step of the newest validation"),
        _gauge("best_validation_loss", "", "lowest loss of a validation"),
        _gauge("validation_metric", "", "accuracy, perplexity or a metric of the user's", "metric"),
        _gauge("validation_loss_slope", "", "change of the validation's loss per step, of the newest two"),
    )
)
_SYSTEM = (
    _system("rank_up", "gauge", "", "1 while the process of the rank lives", RANK_LABELS),
    _system("rank_step", "gauge", "", "step that the rank is in, as it reported it", RANK_LABELS),
    _system(
        "rank_silent_seconds",
        "gauge",
        "seconds",
        "time since the rank's last report of progress",
        RANK_LABELS,
    ),
    _system(
        "rank_phase_seconds",
        "counter",
        "seconds",
        "time of the rank without waits for others: data, compute",
        (*RANK_LABELS, "phase"),
    ),
    _system("rank_steps", "counter", "", "steps of the rank", RANK_LABELS),
    _system("rank_straggler", "gauge", "", "1 while the rank is a straggler", (*RUN_LABELS, "rank")),
    _system("rank_cpu_seconds", "counter", "seconds", "processor time of the rank's processes", RANK_LABELS),
    _system("rank_memory_bytes", "gauge", "bytes", "resident memory of the rank's processes", RANK_LABELS),
    _system("node_cpu_seconds", "counter", "seconds", "busy time of all processors of the node", NODE_LABELS),
    _system("node_cpus", "gauge", "", "processors of the node", NODE_LABELS),
    _system("node_memory_bytes", "gauge", "bytes", "memory of the node", NODE_LABELS),
    _system(
        "node_memory_available_bytes", "gauge", "bytes", "memory that programs can still get", NODE_LABELS
    ),
    _system("node_disk_bytes", "gauge", "bytes", "size of the file system of the run directory", NODE_LABELS),
    _system("node_disk_free_bytes", "gauge", "bytes", "free space there", NODE_LABELS),
    _system("node_disk_read_bytes", "counter", "bytes", "bytes read from the node's disks", NODE_LABELS),
    _system("node_disk_written_bytes", "counter", "bytes", "bytes written to them", NODE_LABELS),
    _system("node_network_received_bytes", "counter", "bytes", "bytes received", (*NODE_LABELS, "interface")),
    _system("node_network_sent_bytes", "counter", "bytes", "bytes sent", (*NODE_LABELS, "interface")),
    _system("gpu_utilization_ratio", "gauge", "ratio", "share of time in which a kernel ran", GPU_LABELS),
    _system("gpu_memory_used_bytes", "gauge", "bytes", "memory in use, of all programs", GPU_LABELS),
    _system("gpu_memory_bytes", "gauge", "bytes", "memory of the GPU", GPU_LABELS),
    _system("gpu_temperature_celsius", "gauge", "celsius", "temperature of the die", GPU_LABELS),
    _system("gpu_power_watts", "gauge", "watts", "power", GPU_LABELS),
    _system("gpu_sm_clock_hertz", "gauge", "hertz", "clock of the multiprocessors", GPU_LABELS),
    _system(
        "gpu_throttled",
        "gauge",
        "",
        "1 while heat or a fault of the power supply reduces the clock",
        GPU_LABELS,
    ),
    _system(
        "gpu_ecc_errors", "counter", "", "uncorrected memory errors since the driver's start", GPU_LABELS
    ),
)

CATALOGUE: dict[str, Metric] = {metric.name: metric for metric in (*_FRAMEWORK, *_TASK, *_SYSTEM)}
"""Metrics by name without prefix."""


def metric_table() -> Iterator[str]:
    """Yield the lines of the reference page: one table per group."""
    for group, title in (("framework", "Training"), ("task", "Task"), ("system", "System")):
        yield f"## {title}"
        yield ""
        yield "| metric | kind | unit | labels | meaning |"
        yield "|---|---|---|---|---|"
        for metric in CATALOGUE.values():
            if metric.group == group:
                labels = ", ".join(f"`{label}`" for label in metric.labels)
                cells = (f"`{metric.full_name}`", metric.kind, metric.unit, labels, metric.meaning)
                yield f"| {' | '.join(cells)} |"
        yield ""
