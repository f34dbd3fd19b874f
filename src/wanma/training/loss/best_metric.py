"""Validation metric by which `checkpoint.keep_best` chooses checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from wanma.job.errors import JobError, did_you_mean
from wanma.job.sections.checkpoint import CheckpointSection


def best_value(section: CheckpointSection, metrics: Mapping[str, float | None]) -> float | None:
    """Return the value of the job's metric in one validation; None if no sample counts for it.

    Raises:
        JobError: there is no such metric.
    """
    check_metric("checkpoint.best_metric", section.best_metric, metrics)
    return metrics[section.best_metric]


def check_best_metric(
    section: CheckpointSection, metric_names: Iterable[str] | None, validation_samples: int
) -> None:
    """Refuse to compare checkpoints by a metric that validation does not give.

    Args:
        section: `[checkpoint]` of the job.
        metric_names: names of the metrics; None: not known yet.
        validation_samples: number of validation samples.

    Raises:
        JobError: it names the key.
    """
    if section.best_metric != "loss":
        key, name = "checkpoint.best_metric", section.best_metric
        check_validated_metric(f"{key} = '{name}'", key, name, metric_names, validation_samples)


def check_validated_metric(
    setting: str, key: str, name: str, metric_names: Iterable[str] | None, validation_samples: int
) -> None:
    """Refuse a setting that needs a metric of validation where there is none.

    Args:
        setting: key and value of the setting.
        key: key of the job that names the metric.
        name: name of the metric.
        metric_names: names of the metrics of validation; None: not known yet.
        validation_samples: number of validation samples.

    Raises:
        JobError: it names the key.
    """
    if validation_samples == 0:
        raise JobError(
            f"{setting}, but the data has no validation part",
            "set data.validation_fraction, or give a pair (training, validation)",
        )
    if metric_names is not None:
        check_metric(key, name, metric_names)


def check_metric(key: str, name: str, metric_names: Iterable[str]) -> None:
    """Refuse a metric that is not among those of validation.

    Args:
        key: key of the job that names the metric.
        name: name of the metric.
        metric_names: names of the metrics of validation.

    Raises:
        JobError: it names the known ones.
    """
    if name not in (names := list(metric_names)):
        raise JobError(
            f"{key} = '{name}': validation has no such metric.{did_you_mean(name, names)}",
            f"use one of {', '.join(names)}, or define a custom metric: metrics= of wanma.train, "
            "train.metrics of a job",
        )
