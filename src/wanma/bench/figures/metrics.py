"""Metrics of a benchmark: unit, definition, direction, and their values in a measurement.

A metric is a number of each step (`step_seconds`), of each measurement (`startup_seconds`), or a figure
that the program reports (`checkpoint_stall_seconds`); the name of a figure ends in its unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Literal

from wanma.bench.machine_figures.definitions import machine_definition
from wanma.bench.measurements.measurement import PHASE, Measurement, StepRecord, Utilization
from wanma.observe.units import MISSING_TEXT, bytes_text, duration_text, number_text, percent_text

Direction = Literal["lower", "higher", ""]


@dataclass(frozen=True)
class Metric:
    """Number that a benchmark measures."""

    name: str
    title: str
    definition: str
    """Sentence that says what is divided by what, and over what."""
    unit: str = ""
    better: Direction = ""
    """Better direction; empty: neither."""
    is_per_step: bool = False
    """True if each step has a value; otherwise each measurement has one."""

    def text(self, value: float | None) -> str:
        """Return a value with its unit."""
        match self.unit:
            case "s":
                return duration_text(value)
            case "B":
                return bytes_text(value)
            case "share":
                return percent_text(value)
            case "B/s" | "FLOP/s":
                return rate_text(value, self.unit)
            case "1/s":
                return f"{number_text(value)}/s"
            case _:
                return number_text(value)


FIGURE_UNITS: tuple[tuple[str, str, Direction], ...] = (
    ("flops_per_second", "FLOP/s", "higher"),
    ("bytes_per_second", "B/s", "higher"),
    ("per_second", "1/s", "higher"),
    ("seconds", "s", "lower"),
    ("bytes", "B", "lower"),
    ("share", "share", ""),
)
"""Last words of a figure's name, its unit, and the direction in which it is better."""


def _metric(name: str, title: str, definition: str, is_per_step: bool = False, **traits: Any) -> Metric:
    """Return a metric whose unit and better direction follow from the end of its name, or are in `traits`."""
    _, unit, better = _figure_unit(name)
    return Metric(
        name, title, definition, **{"unit": unit, "better": better, **traits}, is_per_step=is_per_step
    )


def _figure_unit(name: str) -> tuple[str, str, Direction]:
    """Return the entry of `FIGURE_UNITS` of a name; of others empty texts."""
    # Only whole words: not milliseconds, or megabytes.
    return next((row for row in FIGURE_UNITS if f"_{name}".endswith(f"_{row[0]}")), ("", "", ""))


STEP_SECONDS = _metric(
    "step_seconds",
    "Step time",
    "Wall clock from the end of one optimizer step to the end of the next. Judged only between steps with as "
    "many samples.",
    True,
)
DATA_SHARE = "data_share"
"""Name of the metric that is a share of the sum of the steps."""
METRICS = (
    STEP_SECONDS,
    _metric(
        "samples_per_second",
        "Samples per second",
        "Samples of a step of all ranks, divided by the time of the step.",
        True,
    ),
    _metric(
        "targets_per_second",
        "Targets per second",
        "Tokens, or labelled samples, that the loss of a step counts, divided by the time of the step.",
        True,
    ),
    _metric(
        "mfu",
        "Model FLOPs utilization",
        "FLOPs of the model in a step, attention counted causally, without recomputation, divided by the "
        "time of the step and the dense peak of all devices.",
        True,
        unit="share",
        better="higher",
    ),
    _metric(
        "mfu_full_attention",
        "MFU, full attention",
        "As MFU, with all attention scores, also those that a causal model masks (Megatron-LM, NeMo, "
        "torchtitan).",
        unit="share",
    ),
    _metric(
        "mfu_palm",
        "MFU of PaLM",
        "FLOPs of a token are 6 N + 12 L H Q T: N parameters with the embedding, L layers, H heads of width "
        "Q, T tokens (Chowdhery et al. 2022, appendix B; nanoGPT, llm-foundry).",
        unit="share",
    ),
    _metric(
        "mfu_6nd",
        "MFU by 6 N D",
        "FLOPs of a token are 6 N, without attention (Kaplan et al. 2020, Hoffmann et al. 2022).",
        unit="share",
    ),
    _metric(
        "hfu",
        "Hardware FLOPs utilization",
        "As MFU with full attention, and all that the plan recomputes (Narayanan et al. 2021).",
        unit="share",
    ),
    _metric(
        DATA_SHARE,
        "Data wait",
        "Time in which rank 0 waits for samples, divided by the time, over the steps after the warm-up.",
    ),
    _metric("loss", "Final loss", "Training loss of the last step.", better="lower"),
    _metric(
        "startup_seconds", "Start", "Wall clock from the start of the command to the end of the first step."
    ),
    _metric("total_seconds", "Execution", "Wall clock from the start of the command to its end."),
    _metric(
        "peak_memory_bytes", "Peak memory", "Largest memory of the processes of one measurement together."
    ),
    _metric(
        "time_to_target_seconds",
        "Time to target",
        "Wall clock from the start of the command to the first step or validation that reaches the target.",
    ),
    _metric(
        "samples_to_target",
        "Samples to target",
        "Samples that were consumed when the target was reached.",
        better="lower",
    ),
    _metric(
        "goodput",
        "Goodput",
        "Share of the wall clock, from the first start of the run to its end, in steps that last.",
        unit="share",
        better="higher",
    ),
    _metric(
        "checkpoint_stall_seconds", "Checkpoint stall", "Mean time for which training waits for a checkpoint."
    ),
    _metric(
        "checkpoint_write_seconds",
        "Checkpoint write",
        "Mean time from the end of the stall until the checkpoint is committed, beside training.",
    ),
    _metric(
        "checkpoint_bytes_per_second",
        "Checkpoint write rate",
        "Bytes of all ranks over the time in which they are written.",
    ),
    _metric(
        "recovery_seconds",
        "Recovery",
        "Wall clock from a failure to the end of the next step; the longest of the run.",
    ),
    _metric("repeated_steps", "Repeated steps", "Steps that recoveries repeated.", better="lower"),
    _metric(
        "rank_memory_bytes",
        "Memory of a rank",
        "Peak of rank 0: resident memory on a CPU, memory allocated by PyTorch on a GPU.",
    ),
    _metric(
        "cpu_utilization",
        "CPU utilization",
        "CPU time of the contender's processes on this machine, divided by the time and its usable CPUs.",
        unit="share",
    ),
    _metric(
        "gpu_utilization",
        "GPU utilization",
        "Share of the time in which a kernel ran, by NVML, mean over the GPUs.",
        unit="share",
    ),
    _metric(
        "gpu_memory_bytes",
        "GPU memory",
        "Largest memory in use on a GPU of this machine, of all programs.",
        better="",
    ),
    _metric(
        "network_bytes_per_second",
        "Network",
        "Bytes sent and received on all interfaces of this machine but the loopback, over the time.",
        better="",
    ),
    _metric(
        "disk_bytes_per_second",
        "Disk",
        "Bytes read and written on the block devices of this machine, over the time.",
        better="",
    ),
    _metric("validation_loss", "Validation loss", "Loss of the last validation.", better="lower"),
    _metric("perplexity", "Perplexity", "Perplexity of the last validation.", better="lower"),
    _metric("accuracy", "Accuracy", "Accuracy of the last validation.", unit="share", better="higher"),
)
UTILIZATION = (
    "cpu_utilization",
    "gpu_utilization",
    "peak_memory_bytes",
    "gpu_memory_bytes",
    "network_bytes_per_second",
    "disk_bytes_per_second",
)
"""Metrics in the table of the utilization; without a better direction, but for the memory."""
CONVENTION_METRICS = ("mfu_full_attention", "mfu_palm", "mfu_6nd", "hfu")
"""Metrics that are multiples of the own MFU, by conventions of published tables."""
_BY_NAME = {metric.name: metric for metric in METRICS}

_STEP_VALUES: dict[str, Callable[[StepRecord], float | None]] = {
    "step_seconds": lambda step: step.seconds,
    "samples_per_second": lambda step: _rate(step.samples, step.seconds),
    "targets_per_second": lambda step: _rate(step.targets, step.seconds),
    "mfu": lambda step: step.mfu,
}
_MEASUREMENT_VALUES: dict[str, Callable[[Measurement], float | None]] = {
    "loss": lambda measurement: next(
        (step.loss for step in reversed(measurement.steps) if step.loss is not None), None
    ),
    "startup_seconds": lambda measurement: measurement.startup_seconds,
    "total_seconds": lambda measurement: measurement.seconds,
    "peak_memory_bytes": lambda measurement: measurement.machine.peak_memory_bytes,
    **{part.name: attrgetter(f"utilization.{part.name}") for part in fields(Utilization)},
}


def find_metric(name: str) -> Metric:
    """Return the metric of this name; a figure of a program gets unit and direction from its suffix."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name.startswith(PHASE):
        phase = name.removeprefix(PHASE).replace("_", " ")
        definition = f"Time of a step in the phase '{phase}', rank 0."
        return Metric(name, f"Phase {phase}", definition, "s", "lower", is_per_step=True)
    if (machine := machine_definition(name)) is not None:
        return _metric(name, *machine)
    suffix, unit, _ = _figure_unit(name)
    title = name.removesuffix(suffix).replace("_", " ").strip() or name.replace("_", " ")
    return _metric(
        name,
        title.capitalize() + (" per second" if unit == "1/s" else ""),
        "Figure that the program reports.",
    )


def metric_values(measurement: Measurement, name: str, first_step: int = 0) -> list[float]:
    """Return the values of a metric in one measurement: one per step, or at most one.

    Args:
        measurement: the measurement; whether it counts is up to the caller.
        first_step: index of the first step that is steady; earlier ones are left out of metrics per step.
    """
    steps = measurement.compared_steps[first_step:]
    if name in _STEP_VALUES:
        values = [_STEP_VALUES[name](step) for step in steps]
    elif name.startswith(PHASE):
        values = [step.phases.get(name.removeprefix(PHASE)) for step in steps]
    elif name == DATA_SHARE:
        values = [_data_share(steps)]
    elif name in _MEASUREMENT_VALUES:
        values = [_MEASUREMENT_VALUES[name](measurement)]
    else:
        values = [measurement.figures.get(name)]
    return [value for value in values if value is not None]


def rate_text(value: float | None, unit: str) -> str:
    """Return a rate with three significant digits in a decimal multiple of its unit, such as '12.5 GB/s'."""
    if value is None or not math.isfinite(value):
        return MISSING_TEXT
    prefix, size = decimal_prefix(value)
    return f"{value / size:.3g} {prefix}{unit}"


def decimal_prefix(value: float) -> tuple[str, float]:
    """Return the prefix of a rate, such as 'G', and its size; links, disks and devices count in decimal."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return prefix, size
    return "", 1.0


def _data_share(steps: Sequence[StepRecord]) -> float | None:
    """Return the share of the steps' time in the phase 'data'; None: no step has it.

    It is a share of the sum: a loader that is late at every tenth step is late at no median one.
    """
    timed = [step for step in steps if "data" in step.phases and math.isfinite(step.seconds)]
    return _rate(sum(step.phases["data"] for step in timed), sum(step.seconds for step in timed))


def _rate(amount: float | None, seconds: float) -> float | None:
    return None if amount is None or seconds <= 0 else amount / seconds
