"""Present values of the metrics of a run and of its nodes, from the records in its directory; pure.

The endpoint, the alerts and the live page take their values from here, so all show the same.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from wanma.job.forecast.forecast import StepTime
from wanma.job.forecast.step_phases import (
    communication_kinds,
    forecast_exposed_communication,
    forecast_phases,
)
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import Event
from wanma.observe.series.catalogue import (
    CATALOGUE,
    FORECAST_PREFIX,
    GPU_LABELS,
    NODE_LABELS,
    RANK_LABELS,
    STEP_GAUGES,
)

Labels = tuple[tuple[str, str], ...]
"""Labels of a series without those of the run, as pairs of name and value."""

_STEP_COUNTERS = {
    "phase_seconds": ("phases", "phase"),
    "load_seconds": ("load_seconds", "part"),
    "exposed_communication_seconds": ("exposed_communication_seconds", "kind"),
    "communication_seconds": ("communication_seconds", "kind"),
}
"""Key of a step record, and the label of its parts, by the counter that sums it."""
_RUN_COUNTERS = (
    "steps",
    "step_time_seconds",
    "non_finite_steps",
    "bad_samples",
    "checkpoints",
    "recoveries",
    "starts",
)
"""Counters that are zero at first."""
_REPEATABLE_STEPS = 50_000
"""Newest steps whose times are kept for the case that they are repeated."""


@dataclass(frozen=True)
class Sample:
    """Present value of one series."""

    metric: str
    """Name in the catalogue."""
    labels: Labels
    value: float


class Series:
    """Series by metric and labels; base of those of a run and of a node."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, Labels], float] = {}

    def get(self, metric: str, /, **labels: str) -> float | None:
        """Return the present value of a series; None: it has none."""
        return self._values.get((metric, tuple(sorted(labels.items()))))

    def samples(self) -> Iterator[Sample]:
        """Yield the present value of each series."""
        return (Sample(metric, labels, value) for (metric, labels), value in self._values.items())

    def _set(self, metric: str, value: Any, /, **labels: str) -> None:
        """Set a series; None removes it."""
        key = (metric, tuple(sorted(labels.items())))
        if value is None:
            self._values.pop(key, None)
        else:
            self._values[key] = float(value)

    def _add(self, metric: str, value: Any, /, **labels: str) -> None:
        if value is not None and math.isfinite(value):
            key = (metric, tuple(sorted(labels.items())))
            self._values[key] = self._values.get(key, 0.0) + float(value)

    def _drop(self, prefix: str) -> None:
        """Remove all series of the metrics whose names begin so."""
        for key in [key for key in self._values if key[0].startswith(prefix)]:
            del self._values[key]


class RunSeries(Series):
    """Series of a run, from its plan and its events in the order of their time.

    Args:
        plan: content of plan.json; empty: it is unknown.
        checkpoint_interval_steps: steps between two checkpoints, by the job; 0: there are none.
    """

    def __init__(self, plan: Mapping[str, Any] | None = None, checkpoint_interval_steps: int = 0) -> None:
        super().__init__()
        self._interval_steps = checkpoint_interval_steps
        self._planned: Mapping[str, Any] = plan or {}
        self._begin_history()

    def _begin_history(self) -> None:
        """Begin with no record: of a run, or of another training in its folder (`--fresh`)."""
        self._values.clear()
        self._plan_text = ""
        self._first_start: float | None = None
        self._useful: deque[tuple[int, float]] = deque(maxlen=_REPEATABLE_STEPS)
        """Newest steps that count, with their times."""
        self._useful_seconds = 0.0
        """Sum of the times of all steps that count."""
        self._newest_time = 0.0
        self._has_started = self._is_over = self._is_first_step = False
        for name in _RUN_COUNTERS:
            self._set(name, 0)
        self._set("up", 0)
        self._set("checkpoint_interval_steps", self._interval_steps or None)
        self._set_plan(self._planned)

    def samples(self) -> Iterator[Sample]:
        """Yield the present values; without a `start`, which only the node of rank 0 sees, that of `up`."""
        return (sample for sample in super().samples() if self._has_started or sample.metric == "up")

    def replay(self, records: Iterable[Event]) -> None:
        """Take the records of earlier starts, so that totals of the run go on from them.

        What counts since the supervisor began, such as `steps`, stays zero.
        """
        for record in records:
            if record["kind"] == "step":
                self._newest_time = max(self._newest_time, record.get("time") or 0.0)
                self._count_useful(record)
            else:
                self.update(record)
        self._set("up", 0)
        self._drop("run_info")
        self._drop("rank_straggler")
        self._has_started = self._is_over = False

    def _set_plan(self, planned: Mapping[str, Any]) -> None:
        """Take the forecast of a plan, as plan.json has it."""
        self._planned = planned
        self._drop(FORECAST_PREFIX)
        for name, value in _forecasts(planned).items():
            self._set(f"{FORECAST_PREFIX}{name}", value)
        with contextlib.suppress(LookupError, TypeError, ValueError):  # unknown, or of another version
            step = StepTime(**(planned.get("forecast") or {})["step"])
            plan = Plan.from_json(planned.get("plan") or {})
            for phase, seconds in forecast_phases(step, plan).items():
                self._set("forecast_phase_seconds", seconds, phase=phase)
            exposed = forecast_exposed_communication(step)
            for kind in communication_kinds(plan):
                self._set("forecast_exposed_communication_seconds", exposed[kind], kind=kind)

    def update(self, event: Event) -> None:
        """Take one event of events.jsonl, or a step record with the kind `step`."""
        self._newest_time = max(self._newest_time, event.get("time") or 0.0)
        match event["kind"]:
            case "step":
                self._update_step(event)
            case "start":
                self._update_start(event)
            case "validation":
                self._update_validation(event)
            case "checkpoint":
                self._set("checkpoint_step", event.get("step"))
                self._set("checkpoint_timestamp_seconds", event.get("time"))
                self._set("checkpoint_bytes", event.get("bytes"))
                self._set("checkpoint_write_seconds", event.get("write_seconds"))
                self._add("checkpoints", 1)
                self._add("checkpoint_stall_seconds", event.get("stall_seconds"))
            case "recovery" | "resize":
                self._add("recoveries", event["kind"] == "recovery")
                self._add("recovery_seconds", event.get("seconds"))
                self._add("repeated_steps", event.get("repeated_steps"))
            case "planned":
                self._set_plan(event)
            case "straggler":
                self._set("rank_straggler", 1 if event.get("is_slow", True) else 0, rank=str(event["rank"]))
            case "finish":
                self._is_over = True
                self._set("up", 0)
                self._set_info(event.get("outcome", "finished"))
        self._set_goodput()

    def mark_alive(self, is_alive: bool) -> None:
        """Note whether ranks live: a node without rank 0 sees no start. After its end the run stays down."""
        if is_alive and not self._is_over:
            self._set("up", 1)

    def _update_step(self, record: Event) -> None:
        for metric in STEP_GAUGES:
            if metric.key in record or metric.name in ("loss", "gradient_norm"):
                value = record.get(metric.key)
                self._set(metric.name, _non_finite(record, metric.key) if value is None else value)
        targets = _targets(record)
        if targets and (forecast_seconds := self.get("forecast_step_seconds")):
            self._set("forecast_targets_per_second", targets / forecast_seconds)
        self._set("completed_steps", record["step"])
        self._set("last_step_timestamp_seconds", record.get("time"))
        if not self._is_first_step:
            self._add_step_times(record)
        self._is_first_step = False
        for layer, norm in (record.get("layer_grad_norms") or {}).items():
            self._set("layer_gradient_norm", norm, layer=layer)
        # With fp16, a gradient that overflows is a part of loss scaling; the plan's words have the precision.
        keys = ("loss",) if "fp16" in self._plan_text else ("loss", "grad_norm")
        self._add("non_finite_steps", any(_non_finite(record, key) is not None for key in keys))
        if "bad_samples" in record:
            self._set("bad_samples", record["bad_samples"])
        self._count_useful(record)

    def _add_step_times(self, record: Event) -> None:
        """Add to the sums of times, which leave out the slow first step of a start."""
        self._add("steps", 1)
        self._add("step_time_seconds", record.get("step_seconds"))
        self._add("targets", _targets(record))
        for metric, (key, label) in _STEP_COUNTERS.items():
            for name, seconds in (record.get(key) or {}).items():
                self._add(metric, seconds, **{label: name})
        self._add("bubble_seconds", record.get("bubble_seconds"))

    def _count_useful(self, record: Event) -> None:
        seconds = record.get("step_seconds") or 0.0
        self._useful.append((record["step"], seconds))
        self._useful_seconds += seconds

    def _update_start(self, event: Event) -> None:
        done, is_restart = event.get("step", 0), bool(event.get("is_restart"))
        if done == 0 and not is_restart:
            self._begin_history()
        lost = 0
        while self._useful and self._useful[-1][0] > done:
            self._useful_seconds -= self._useful.pop()[1]
            lost += 1
        if not is_restart:
            self._add("starts", 1)
            self._add("repeated_steps", lost)
        self._has_started, self._is_over, self._is_first_step = True, False, True
        if self._first_start is None:
            self._first_start = event.get("time")
            self._newest_time = event.get("time") or 0.0
        if (newest := self.get("checkpoint_step")) is None or newest > done:
            self._set("checkpoint_step", done)
            self._set("checkpoint_timestamp_seconds", event.get("time"))
        self._set("completed_steps", done)
        self._set("target_steps", event.get("steps"))
        self._set("ranks", event.get("world_size"))
        self._set("start_timestamp_seconds", event.get("time"))
        self._set("up", 1)
        self._drop("rank_straggler")
        self._plan_text = str(event.get("plan", ""))
        self._set_info("running")

    def _set_info(self, state: str) -> None:
        self._drop("run_info")
        self._set("run_info", 1, state=state, plan=self._plan_text)

    def _update_validation(self, event: Event) -> None:
        loss, step, best = event.get("loss"), event.get("step", 0), self.get("best_validation_loss")
        before, before_step = self.get("validation_loss"), self.get("validation_step")
        if loss is not None and before is not None and before_step is not None and step > before_step:
            self._set("validation_loss_slope", (loss - before) / (step - before_step))
        self._set("validation_loss", loss)
        self._set("validation_step", step)
        if loss is not None and (best is None or loss < best):
            self._set("best_validation_loss", loss)
        named = {key: event.get(key) for key in ("perplexity", "accuracy")} | (event.get("metrics") or {})
        for name, value in named.items():
            self._set("validation_metric", value, metric=name)

    def _set_goodput(self) -> None:
        """Relate the time of the steps that count to all time since the first start."""
        if self._first_start is None:
            return
        seconds = max(self._newest_time - self._first_start, 1e-9)
        ranks = self.get("ranks") or 1.0
        self._set("run_seconds", seconds)
        self._set("goodput_ratio", min(self._useful_seconds / seconds, 1.0))
        self._set("device_seconds", ranks * seconds)
        self._set("used_device_seconds", ranks * max(self._useful_seconds, 0.0))


def _forecasts(planned: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the forecasts of a plan, as plan.json has it, by the name of the metric; None: it has none."""
    forecast, plan = planned.get("forecast") or {}, planned.get("plan") or {}
    step, run = forecast.get("step") or {}, forecast.get("run") or {}
    useful, checkpoint = run.get("useful") or {}, forecast.get("checkpoint") or {}
    step_seconds, energy, run_seconds = step.get("seconds"), run.get("energy_joules"), run.get("seconds")
    # Rank 0, whose peak is recorded, has the first stage; of a GPU it is the memory that torch allocates.
    is_on_gpu = plan.get("device") == "cuda"
    rank_0 = next(iter(forecast.get("pipeline_ranks") or ()), forecast)
    return {
        "step_seconds": step_seconds,
        "step_upper_seconds": step_seconds and (1 + step.get("uncertainty", 0.0)) * step_seconds,
        "bubble_seconds": step.get("bubble") if plan.get("pp", 1) > 1 else None,
        "mfu_ratio": forecast.get("model_flops_utilisation"),
        "memory_bytes": rank_0.get("tensor_bytes" if is_on_gpu else "memory_bytes"),
        "gpu_memory_used_bytes" if is_on_gpu else "rank_memory_bytes": forecast.get("memory_bytes"),
        "checkpoint_bytes": checkpoint.get("size_bytes"),
        "checkpoint_stall_seconds": checkpoint.get("stall_seconds"),
        "checkpoint_write_seconds": checkpoint.get("write_seconds"),
        "goodput_ratio": useful.get("share"),
        "recovery_seconds": useful.get("seconds_per_failure"),
        "run_seconds": run_seconds,
        "power_watts": energy / run_seconds if energy and run_seconds else None,
    }


class NodeSeries(Series):
    """Series of a node and of its ranks, from its newest event of usage: a record of logs/node-N.jsonl."""

    def __init__(self, record: Event) -> None:
        super().__init__()
        node = str(record["node"])
        self._set_all(NODE_LABELS, record, node=node)
        for name, (received, sent) in (record.get("interfaces") or {}).items():
            self._set("node_network_received_bytes", received, interface=name, node=node)
            self._set("node_network_sent_bytes", sent, interface=name, node=node)
        for rank in record.get("ranks", ()):
            labels = {"rank": str(rank["rank"]), "node": node}
            self._set_all(RANK_LABELS, rank, **labels)
            for phase in ("data", "compute"):
                self._set("rank_phase_seconds", rank.get(f"{phase}_seconds"), **labels, phase=phase)
        for gpu in record.get("gpus") or ():
            if gpu.get("is_used", True):
                self._set_all(GPU_LABELS, gpu, gpu=str(gpu["gpu"]), node=node)

    def _set_all(self, names: tuple[str, ...], record: Mapping[str, Any], **labels: str) -> None:
        """Set the metrics that have these labels from a record of a node, rank or GPU."""
        for metric in CATALOGUE.values():
            if metric.labels == names:
                self._set(metric.name, record.get(metric.key), **labels)


def _targets(record: Event) -> float:
    """Return the number of targets of a step."""
    return float((record.get("tokens_per_second") or 0.0) * (record.get("step_seconds") or 0.0))


def _non_finite(record: Event, key: str) -> float | None:
    """Return the non-finite number of a record, which its JSON has as null; None: there is none."""
    value = record.get(key)
    if isinstance(value, float) and not math.isfinite(value):
        return value
    text = (record.get("non_finite") or {}).get(key)
    return None if text is None else float(text)
