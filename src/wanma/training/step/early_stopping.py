"""End of a run whose validation metric no longer improves; its state is kept in checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from wanma.job.sections.job import Job
from wanma.job.sections.train import TrainSection
from wanma.observe.units import count_text
from wanma.training.loss.best_metric import check_best_metric, check_validated_metric


@dataclass
class EarlyStopping:
    """State of early stopping: the best validation, and the number of validations since."""

    best: float | None = None
    """Value of `train.stop_metric` with which later ones are compared."""
    best_step: int = 0
    waited: int = 0
    """Number of validations after it; none was better by more than `train.stop_min_delta`."""

    def record_validation(self, step: int, metrics: Mapping[str, float | None], train: TrainSection) -> str:
        """Note a validation; one without a value (None) of `train.stop_metric` changes nothing.

        Returns:
            the reason why the run ends; empty while it continues.

        Raises:
            JobError: there is no such metric.
        """
        if train.stop_patience == 0:
            return ""
        check_stop_metric(train, metrics, validation_samples=1)
        value = metrics[train.stop_metric]
        if value is None:
            return ""
        sign = 1.0 if train.stop_mode == "min" else -1.0
        is_better = math.isfinite(value) and (
            self.best is None or sign * (self.best - value) > train.stop_min_delta
        )
        if is_better:
            self.best, self.best_step, self.waited = value, step, 0
        else:
            self.waited += 1
        if not self.is_over(train):
            return ""
        best = (
            "no value is finite" if self.best is None else f"best {self.best:.6g} at step {self.best_step:,}"
        )
        return (
            f"step {step:,}: the run ends: {train.stop_metric} has not improved in "
            f"{count_text(self.waited, 'validation')} (train.stop_patience = {train.stop_patience}); "
            f"{best}"
        )

    def is_over(self, train: TrainSection) -> bool:
        """Return whether the patience is used up."""
        return 0 < train.stop_patience <= self.waited

    def state_values(self) -> dict[str, Any]:
        """Return the state as a checkpoint keeps it."""
        return {"best": self.best, "best_step": self.best_step, "waited": self.waited}

    @classmethod
    def from_state_values(cls, values: Mapping[str, Any]) -> EarlyStopping:
        """Read the state from a checkpoint's values; older ones have none."""
        return cls(**values.get("early_stopping", {}))


def check_stop_metric(
    train: TrainSection, metric_names: Iterable[str] | None, validation_samples: int
) -> None:
    """Refuse to wait for a validation that does not come, or a metric that it does not give.

    Args:
        train: `[train]` of the job.
        metric_names: names of the metrics; None: not known yet.
        validation_samples: number of validation samples.

    Raises:
        JobError: it names the key.
    """
    if train.stop_patience > 0:
        setting = f"train.stop_patience = {train.stop_patience}"
        check_validated_metric(
            setting, "train.stop_metric", train.stop_metric, metric_names, validation_samples
        )


def check_validation_keys(job: Job, metric_names: Iterable[str] | None, validation_samples: int) -> None:
    """Refuse keys that wait for a metric that validation does not give.

    Args:
        job: job of the run.
        metric_names: names of the metrics; None: not known yet.
        validation_samples: number of validation samples.

    Raises:
        JobError: it names the key.
    """
    names = None if metric_names is None else list(metric_names)
    check_stop_metric(job.train, names, validation_samples)
    check_best_metric(job.checkpoint, names, validation_samples)


def unused_validation_keys_note(job: Job, validation_samples: int, has_user_metrics: bool) -> str | None:
    """Return a note on the keys without effect on data without a validation part; None without such keys.

    Args:
        job: job of the run.
        validation_samples: number of validation samples.
        has_user_metrics: true if the user has given metrics.
    """
    interval = job.train.validate_every_steps
    idle = [f"train.validate_every_steps = {interval:,}"] if interval else []
    idle += ["metrics"] if has_user_metrics else []
    if validation_samples > 0 or not idle:
        return None
    way_out = "" if job.data.validation_fraction else "set data.validation_fraction, or "
    return (
        f"{' and '.join(idle)} without effect: the data has no validation part; {way_out}give a pair "
        "(training, validation)"
    )
