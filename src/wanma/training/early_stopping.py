"""The end of a run whose validation metric no longer improves; its state is kept in checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from wanma.job.errors import JobError, did_you_mean
from wanma.job.sections import TrainSection
from wanma.observe.units import count_text


@dataclass
class EarlyStopping:
    """Validations since the best one."""

    best: float | None = None
    """Value of `train.stop_metric` that later ones are compared with."""
    best_step: int = 0
    waited: int = 0
    """Validations after it, none of which was better by more than `train.stop_min_delta`."""

    def see(self, step: int, metrics: Mapping[str, float], train: TrainSection) -> str:
        """Take note of a validation.

        Returns:
            why the run ends; empty while it goes on.

        Raises:
            JobError: there is no such metric.
        """
        if train.stop_patience == 0:
            return ""
        check_stop_metric(train, metrics, validation_samples=1)
        value = metrics[train.stop_metric]
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
            "none is a number" if self.best is None else f"{self.best:.6g} of step {self.best_step:,} is best"
        )
        return (
            f"step {step:,}: the run ends, for {train.stop_metric} has not improved in "
            f"{count_text(self.waited, 'validation')} (train.stop_patience = {train.stop_patience}); {best}"
        )

    def is_over(self, train: TrainSection) -> bool:
        """Return whether the patience is at its end."""
        return 0 < train.stop_patience <= self.waited

    def values(self) -> dict[str, Any]:
        """As a checkpoint keeps them."""
        return {"best": self.best, "best_step": self.best_step, "waited": self.waited}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> EarlyStopping:
        """Read it from a checkpoint's state; older ones have none."""
        return cls(**values.get("early_stopping", {}))


def check_stop_metric(train: TrainSection, known: Iterable[str] | None, validation_samples: int) -> None:
    """Refuse to wait for a validation that does not come, or a metric that it does not give.

    Args:
        known: names of the metrics; None: not known yet.
        validation_samples: of the data.

    Raises:
        JobError: names the key.
    """
    if train.stop_patience == 0:
        return
    if validation_samples == 0:
        raise JobError(
            f"train.stop_patience = {train.stop_patience}, but the data has no validation part",
            "set data.validation_fraction, or give a pair (training, validation)",
        )
    if known is not None and train.stop_metric not in (names := list(known)):
        raise JobError(
            f"train.stop_metric = '{train.stop_metric}': validation gives no such metric."
            f"{did_you_mean(train.stop_metric, names)}",
            f"it gives {', '.join(names)}; own ones: metrics= of wanma.train, train.metrics of a job",
        )
