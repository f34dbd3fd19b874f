"""Catalogue of metrics: the one table of names, kinds, labels, sources and meanings.

Names are those of Prometheus: the prefix `wanma_`, base units at their end, `_total` for counters.
The endpoint, the alert rules, the Grafana dashboards and the page docs/reference/metrics.md are made from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

RUN_LABELS = ("run", "job")
"""Labels of every series: the endpoint exports `run`, and its target in service discovery has `job`."""
NODE_LABELS = (*RUN_LABELS, "node")
RANK_LABELS, GPU_LABELS = (*NODE_LABELS, "rank"), (*NODE_LABELS, "gpu")
FORECAST_PREFIX = "forecast_"
"""Beginning of the name of a metric that forecasts the one with the rest of the name."""


@dataclass(frozen=True)
class Metric:
    """Metric: one name, with or without several series."""

    name: str
    """Name without the prefix; a counter's without `_total`."""
    kind: Literal["gauge", "counter"]
    meaning: str
    labels: tuple[str, ...]
    key: str
    """Key of a record that has its value: of a step, or of a node, rank or GPU by its labels."""

    @property
    def family_name(self) -> str:
        """Return the name of the metric, which Prometheus completes for a counter."""
        return f"wanma_{self.name}"

    @property
    def full_name(self) -> str:
        """Return the name of its series, as a query has it."""
        return self.family_name if self.kind == "gauge" else "_".join((self.family_name, "total"))

    @property
    def forecast(self) -> Metric | None:
        """Return the metric that forecasts this one, of a sum its part in a step; None: nothing does."""
        return CATALOGUE.get(FORECAST_PREFIX + self.name.replace("step_time", "step"))

    def promql(
        self, function: str, window: str, by: Sequence[str] = (), offset: str = "", **matched: str
    ) -> str:
        """Return the query of it, or of a function of it in a window, by labels; default: by all.

        A resume and each node have targets of their own, of which it makes one series.
        """
        matchers = ",".join(f'{label}="{text}"' for label, text in matched.items())
        selector = self.full_name + (f"{{{matchers}}}" if matchers else "")
        expression = f"{function}({selector}[{window}]{offset})" if function else selector
        return f"max by ({', '.join(by or self.labels)}) ({expression})"


def _gauge(
    name: str, meaning: str, labels: str = "", key: str = "", kind: Literal["gauge", "counter"] = "gauge"
) -> Metric:
    """Return a metric; `labels` has blanks between them, and `key` is by default the name after the last."""
    own = labels.split()
    key = key or (name.removeprefix(f"{own[-1]}_") if own else name)
    return Metric(name, kind, meaning, (*RUN_LABELS, *own), key)


_counter = partial(_gauge, kind="counter")


STEP_GAUGES = (
    _gauge("loss", "mean loss over the targets of the last step, before the update; nats per target"),
    _gauge("learning_rate", "learning rate of the last update"),
    _gauge("gradient_norm", "global L2 norm of the last gradient before clipping", key="grad_norm"),
    _gauge("loss_scale", "fp16: scale of the loss in the next step"),
    _gauge("staleness", "parameter servers, not synchronous: updates that the last update missed"),
    _gauge("embedding_hit_rate", "embedding tables on disk: share of a step's rows that was in memory"),
    _gauge("expert_load_imbalance", "mixtures of experts: maximum tokens of an expert over the mean"),
    _gauge("balance_loss", "mixtures of experts: balancing loss per target"),
    _gauge("samples", "samples consumed: the position in the data"),
    _gauge(
        "targets_per_second",
        "targets (tokens, or labelled samples) over the time of the last step",
        key="tokens_per_second",
    ),
    _gauge("mfu_ratio", "model FLOPs utilization of the last step", key="mfu"),
    _gauge("step_seconds", "time of the last step"),
    _gauge("memory_bytes", "peak memory of rank 0 so far"),
)
"""Metrics that a step record has."""
GROUPS: dict[str, tuple[Metric, ...]] = {
    "Training": (
        *STEP_GAUGES,
        _gauge("run_info", "1; labels: state of the run and its plan in words", "state plan"),
        _gauge("up", "1 while the run trains, 0 after its end"),
        _gauge("completed_steps", "optimizer steps completed"),
        _gauge("target_steps", "step at which the run ends"),
        _gauge("layer_gradient_norm", "gradient norm by layer, where it is recorded", "layer"),
        _gauge("last_step_timestamp_seconds", "time at which the last step was recorded, unix"),
        _counter("steps", "steps since the supervisor began, repeated ones too, but the first of each start"),
        _counter("step_time_seconds", "sum of the times of these steps"),
        _counter("targets", "their targets: tokens, or labelled samples"),
        _counter("phase_seconds", "sum of their times on rank 0 by phase", "phase"),
        _counter("load_seconds", "time of rank 0's loader threads and processes by part", "part"),
        _counter("exposed_communication_seconds", "exposed communication of rank 0", "kind"),
        _counter("communication_seconds", "its communication, exposed or not; not on GPUs", "kind"),
        _counter("bubble_seconds", "bubble of the pipeline on rank 0"),
        _counter("non_finite_steps", "steps with a loss, or but in fp16 a gradient norm, that is not finite"),
        _counter("bad_samples", "samples that could not be read, of all ranks"),
        _gauge("forecast_step_seconds", "forecast of the time of a step"),
        _gauge("forecast_step_upper_seconds", "upper end of its 90 % interval"),
        _gauge(
            "forecast_phase_seconds",
            "forecast of it by phase; on GPUs and in pipelines `forward_backward` has the communication",
            "phase",
        ),
        _gauge(
            "forecast_exposed_communication_seconds",
            "forecast of the exposed communication of a step; that of a pipeline is its bubble",
            "kind",
        ),
        _gauge("forecast_bubble_seconds", "forecast of the bubble of a step, with transfers between stages"),
        _gauge("forecast_targets_per_second", "targets of the last step over the forecast of its time"),
        _gauge("forecast_mfu_ratio", "forecast of the model FLOPs utilization"),
        _gauge("forecast_memory_bytes", "forecast of the peak memory; on mixed nodes of the fullest rank"),
        _gauge("forecast_checkpoint_bytes", "forecast of the size of a checkpoint"),
        _gauge("forecast_checkpoint_stall_seconds", "forecast of the stall for one checkpoint"),
        _gauge("forecast_checkpoint_write_seconds", "forecast of the time of its write"),
        _gauge("forecast_goodput_ratio", "forecast of the goodput, with failures and in-memory checkpoints"),
        _gauge("forecast_recovery_seconds", "forecast of what one failure costs, repeated steps included"),
        _gauge("forecast_run_seconds", "forecast of the time of the whole run, with failures"),
        _gauge("forecast_power_watts", "forecast of the mean power of all nodes at the wall, GPUs included"),
        _gauge("checkpoint_step", "step of the newest checkpoint; before the first, that of the start"),
        _gauge("checkpoint_timestamp_seconds", "time at which it was committed, unix"),
        _gauge("checkpoint_bytes", "its size, of all ranks"),
        _gauge("checkpoint_write_seconds", "time of its write in the background"),
        _gauge("checkpoint_interval_steps", "steps between two checkpoints, by the job"),
        _counter("checkpoints", "checkpoints committed"),
        _counter("checkpoint_stall_seconds", "time for which saving stopped the training"),
        _counter("recoveries", "failures that did not end the run"),
        _counter("recovery_seconds", "time from each failure to the first new step"),
        _counter("repeated_steps", "steps that recoveries and resumes repeated"),
        _counter("starts", "starts of the run, by the user or its engine"),
        _gauge("start_timestamp_seconds", "time of the newest start, unix"),
        _gauge("ranks", "ranks of the run by its plan"),
        _gauge("run_seconds", "time since the run's first start"),
        _gauge("goodput_ratio", "time of the steps that count over that time"),
        _gauge("device_seconds", "devices times the time since the run's first start: what was allocated"),
        _gauge("used_device_seconds", "devices times the time of the steps that count"),
        _gauge(
            "alert",
            "1 while the alert fires, as the run's own supervisors see it, by what it names",
            "alert severity node rank gpu",
        ),
    ),
    "Task": (
        _gauge("validation_loss", "loss of the newest validation"),
        _gauge("best_validation_loss", "lowest loss of a validation"),
        _gauge("validation_step", "step of the newest validation"),
        _gauge("validation_loss_slope", "change of the validation's loss per step, of the newest two"),
        _gauge("validation_metric", "accuracy, perplexity or a metric of the user's", "metric"),
    ),
    "System": (
        _gauge("rank_up", "1 while the process of the rank lives", "node rank", key="is_alive"),
        _gauge("rank_step", "step that the rank is in, as it reported it", "node rank"),
        _gauge("rank_silent_seconds", "time since the rank's last report of progress", "node rank"),
        _counter(
            "rank_phase_seconds",
            "time of the rank without waits for others: data, compute",
            "node rank phase",
        ),
        _counter("rank_steps", "steps of the rank", "node rank"),
        _gauge("rank_straggler", "1 while the rank is a straggler", "rank"),
        _counter("rank_cpu_seconds", "processor time of the rank's processes", "node rank"),
        _gauge("rank_memory_bytes", "resident memory of the rank's processes", "node rank"),
        _gauge("forecast_rank_memory_bytes", "CPUs: forecast of it on the fullest rank"),
        _counter(
            "rank_allocation_retries",
            "allocations of the rank for which its GPU had no room until PyTorch had freed its cache",
            "node rank",
        ),
        _counter("node_cpu_seconds", "busy time of all processors of the node", "node"),
        _gauge("node_cpus", "processors of the node", "node"),
        _gauge("node_memory_bytes", "memory of the node, or of its container's limit", "node"),
        _gauge("node_memory_available_bytes", "memory that programs can still get", "node"),
        _gauge("node_disk_bytes", "size of the file system of the run directory", "node"),
        _gauge("node_disk_free_bytes", "free space there", "node"),
        _counter("node_disk_read_bytes", "bytes read from the node's disks", "node"),
        _counter("node_disk_written_bytes", "bytes written to them", "node"),
        _counter("node_network_received_bytes", "bytes received", "node interface"),
        _counter("node_network_sent_bytes", "bytes sent", "node interface"),
        _gauge("gpu_utilization_ratio", "share of time in which a kernel ran", "node gpu", key="utilization"),
        _gauge("gpu_memory_used_bytes", "memory in use, of all programs", "node gpu", key="memory_bytes"),
        _gauge(
            "forecast_gpu_memory_used_bytes",
            "GPUs: forecast of it on the fullest rank, with CUDA itself and gaps between tensors",
        ),
        _gauge(
            "gpu_memory_needed_bytes",
            "of it what PyTorch cannot free: without its cache beyond the peak of its tensors",
            "node gpu",
            key="needed_memory_bytes",
        ),
        _gauge("gpu_memory_bytes", "memory of the GPU", "node gpu", key="total_memory_bytes"),
        _gauge("gpu_temperature_celsius", "temperature of the die", "node gpu", key="celsius"),
        _gauge("gpu_power_watts", "power", "node gpu"),
        _gauge("gpu_sm_clock_hertz", "clock of the multiprocessors", "node gpu", key="clock_hertz"),
        _gauge(
            "gpu_throttled",
            "1 while heat or a fault of the power supply reduces the clock",
            "node gpu",
            key="is_throttled",
        ),
        _counter("gpu_ecc_errors", "uncorrected memory errors since the driver's start", "node gpu"),
        _gauge(
            "gpu_xid",
            "XID number of the newest error by the driver since the supervisor began; 0: none",
            "node gpu",
        ),
    ),
}
CATALOGUE: dict[str, Metric] = {metric.name: metric for group in GROUPS.values() for metric in group}
"""Metrics by name without prefix."""
