"""Validation metrics of the user's: sums and counts over all samples, divided once.

A metric gives one value per sample or target, and is their mean over all validation samples; or a pair whose
sums over all samples are divided: values and a mask, values and weights, or two numbers. So no cut into ranks
and micro-batches changes it. Padding rows never reach it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.data.batch import IGNORE_INDEX, widen_integers
from wanma.job.errors import AllRanksError, JobError, WanmaError
from wanma.job.file.import_path import import_object
from wanma.job.sections.job import Job
from wanma.job.user_frames import user_frame_text
from wanma.observe.units import count_text
from wanma.training.loss.loss_functions import correct_count, full_output
from wanma.training.loss.target_counting import Losses, expand_weights

MetricValue = Any
"""Tensor of values, one per sample or target; or a pair of these and their weights; or (sum, count)."""
MetricFunction = Callable[[Any, Any], MetricValue]
"""Function (model output, targets) -> `MetricValue`."""
ValidationResult = Losses | tuple[Losses, Mapping[str, MetricValue]]
"""Losses of a batch; or a pair of these and of metrics by name."""

ACCURACY = "accuracy"
_USUAL = ("perplexity", ACCURACY)
"""Metrics that wanma computes by itself."""
_TOLERANCE = 1e-3
"""Relative difference between the sums of a batch and of its halves that counts as rounding."""
_RETURN_HINT = (
    "return one value per sample or target (wanma takes the mean), (values, mask), (values, weights), or "
    "(sum, count)"
)


class Metrics:
    """Sums of some metrics over the batches of a validation.

    Args:
        functions: metrics by name.
        is_per_position: true if ranks share each sample's sequence, so that values must be those of single
            positions.
    """

    def __init__(self, functions: Mapping[str, MetricFunction], *, is_per_position: bool = False) -> None:
        self._functions = dict(functions)
        self._is_per_position = is_per_position
        self._sums: dict[str, tuple[Tensor | float, Tensor | float]] = {}
        self.compares_halves = False
        """True if each batch is compared with its halves."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._functions)

    def reset(self) -> None:
        """Reset the sums to zero."""
        self._sums = dict.fromkeys(self._functions, (0.0, 0.0))

    def add(self, output: Any, targets: Any, real: Tensor) -> None:
        """Add the values of a batch.

        Args:
            output: output of the model.
            targets: targets of the batch.
            real: (rows,) bool, false for padding rows.

        Raises:
            WanmaError: a metric failed, or returned nothing that can be summed.
        """
        if not self._functions or not bool(real.any()):
            return
        output = full_output(output)
        if not bool(real.all()):
            output, targets = (_select_rows(value, real, len(real)) for value in (output, targets))
        rows = int(real.sum())
        for name, function in self._functions.items():
            batch_value = self._call(name, function, output, targets, rows)
            if self.compares_halves:
                self._compare_halves(name, function, output, targets, rows, batch_value)
            total, count = self._sums[name]
            self._sums[name] = (total + batch_value[0], count + batch_value[1])

    def sums(self, device: torch.device, *, contributes: bool) -> tuple[Tensor, ...]:
        """Return sum and count of each metric, fp64 scalars; zero where another rank counts the same."""
        numbers = [number if contributes else 0.0 for pair in self._sums.values() for number in pair]
        return tuple(torch.as_tensor(n, dtype=torch.float64, device=device) for n in numbers)

    def _call(
        self, name: str, function: MetricFunction, output: Any, targets: Any, rows: int
    ) -> tuple[Tensor | float, Tensor | float]:
        try:
            value = function(output, targets)
        except WanmaError:
            raise
        except Exception as error:  # whatever the user's code raises
            line = user_frame_text(error)
            raise WanmaError(
                f"metric '{name}' failed: {type(error).__name__}: {error}"
                + (f"\n    {line}" if line else ""),
                "fix the function: validation calls it with (output, targets) of the samples of a "
                "batch, without padding",
            ) from error
        return sum_and_count(name, value, rows, targets if self._is_per_position else None)

    def _compare_halves(
        self,
        name: str,
        function: MetricFunction,
        output: Any,
        targets: Any,
        rows: int,
        batch_value: tuple[Tensor | float, Tensor | float],
    ) -> None:
        """Refuse a metric whose sums of a batch differ from those of its halves together."""
        if rows < 2:
            return
        target = next(iter(targets.values())) if isinstance(targets, Mapping) else targets
        first = torch.arange(rows, device=target.device) < rows // 2
        halves = [
            self._call(
                name,
                function,
                _select_rows(output, part, rows),
                _select_rows(targets, part, rows),
                int(part.sum()),
            )
            for part in (first, ~first)
        ]
        for batch_sum, *parts in zip(batch_value, *halves, strict=True):
            sum_of_halves = sum(map(float, parts))
            if not math.isclose(
                float(batch_sum), sum_of_halves, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE
            ) and not (math.isnan(float(batch_sum)) and math.isnan(sum_of_halves)):
                raise JobError(
                    f"metric '{name}' depends on the division into batches: {float(batch_sum):.6g} for a "
                    f"batch of {rows} samples, {sum_of_halves:.6g} for the same samples in two halves",
                    f"{_RETURN_HINT}: wanma sums over the ranks and divides once. Outputs (rows, 1) and "
                    "targets (rows,) are broadcast to (rows, rows)",
                )


class ReportedMetrics:
    """Sums of metrics that a user's own validation gives beside the losses of each batch."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor | float, Tensor | float]] = {}
        self._are_names_checked = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._sums))

    def reset(self) -> None:
        """Reset the sums to zero."""
        self._sums = dict.fromkeys(self._sums, (0.0, 0.0))

    def add(self, values: Mapping[str, MetricValue], rows: int, real: Tensor) -> None:
        """Add the values of a batch; a padding batch, which has one row, counts for nothing.

        Raises:
            WanmaError: a value cannot be summed, or there are other names than in the batch before.
        """
        check_metric_names(values)
        if self._sums and set(values) != set(self._sums):
            raise WanmaError(
                f"validate= returned the metrics {', '.join(values) or 'none'}, but "
                f"{', '.join(self.names)} for an earlier batch",
                "return the same names for every batch",
            )
        for name, value in values.items():
            batch_value = sum_and_count(name, value, rows) if bool(real.all()) else (0.0, 0.0)
            before = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = (before[0] + batch_value[0], before[1] + batch_value[1])

    def sums(self, device: torch.device, *, contributes: bool) -> tuple[Tensor, ...]:
        """Return sum and count of each metric, in the order of names; every rank calls it.

        Raises:
            AllRanksError: ranks have given different names.
        """
        if not self._are_names_checked and dist.get_world_size() > 1:
            names_by_rank: list[tuple[str, ...]] = [()] * dist.get_world_size()
            dist.all_gather_object(names_by_rank, self.names)
            if len(set(names_by_rank)) > 1:
                raise AllRanksError(
                    "validate= returns different metrics on different ranks: "
                    + "; ".join(
                        f"rank {rank}: {', '.join(names) or 'none'}"
                        for rank, names in enumerate(names_by_rank)
                    ),
                    "return the same names on every rank",
                )
        self._are_names_checked = True
        numbers = [number if contributes else 0.0 for name in self.names for number in self._sums[name]]
        return tuple(torch.as_tensor(n, dtype=torch.float64, device=device) for n in numbers)


def sum_and_count(
    name: str, value: object, rows: int, per_position_targets: Tensor | None = None
) -> tuple[Tensor | float, Tensor | float]:
    """Return sum and count of a metric's value for `rows` samples.

    Args:
        name: name of the metric.
        value: value that the metric returned.
        rows: number of samples.
        per_position_targets: targets whose positions the values must have; None: samples or targets alike.

    Raises:
        WanmaError: it was averaged already, or cannot be counted.
    """
    values, weights = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if isinstance(values, Tensor) and values.ndim > 0 and len(values) == rows:
        if per_position_targets is not None and values.shape[:2] != per_position_targets.shape[:2]:
            raise _per_position_error(name)
        return _weighted_sum_and_count(name, values.detach(), weights)
    numbers = [number for number in (values, weights) if _is_number(number)]
    if len(numbers) == 2:
        if per_position_targets is not None:
            raise _per_position_error(name)
        total, count = (
            number.detach().double() if isinstance(number, Tensor) else number for number in numbers
        )
        return total, count
    shape = f" of shape {tuple(values.shape)}" if isinstance(values, Tensor) else ""
    raise WanmaError(
        f"metric '{name}' returned {type(values).__name__}{shape} for {count_text(rows, 'sample')}, which "
        "cannot be summed over ranks and micro-batches",
        _RETURN_HINT,
    )


def user_metrics(
    passed: Mapping[str, MetricFunction] | None, import_paths: Mapping[str, str]
) -> dict[str, MetricFunction]:
    """Return the metrics that the user passed, and those that the job names.

    Raises:
        JobError: one cannot be imported or called.
    """
    functions = {name: import_object(path, f"train.metrics.{name}") for name, path in import_paths.items()}
    return check_metrics({**functions, **(passed or {})})


def check_metrics(metrics: object) -> dict[str, MetricFunction]:
    """Refuse an object that is no mapping of names to metrics.

    Raises:
        JobError: it is no mapping of names to functions.
    """
    if not isinstance(metrics, Mapping):
        raise JobError(
            f"metrics is a {type(metrics).__name__}", "pass a dict: name -> function (output, targets)"
        )
    check_metric_names(metrics)
    for name, function in metrics.items():
        if not callable(function) or isinstance(function, type):
            raise JobError(
                f"metrics: '{name}' is not a function but a {type(function).__name__}",
                "pass a function (output, targets)",
            )
    return dict(metrics)


def check_metric_names(metrics: Mapping[str, object]) -> None:
    """Check the names of metrics.

    Raises:
        JobError: one is no text, or a name that validation gives by itself.
    """
    for name in metrics:
        if not isinstance(name, str) or not name or name in ("loss", "perplexity"):
            raise JobError(f"metrics: {name!r} is not a valid metric name", "rename it")


def split_metrics(result: ValidationResult) -> tuple[Losses, Mapping[str, MetricValue]]:
    """Return the losses and the metrics by name of what a user's validation function returned."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        losses: Any = result[0]
        return losses, result[1]
    plain: Any = result
    return plain, {}


def validation_fields(values: Mapping[str, float | None]) -> dict[str, Any]:
    """Return the fields of a validation's record: the user's own metrics are apart, under `metrics`.

    A metric for which no sample counts has no field; such a loss is None.
    """
    metrics = {name: value for name, value in values.items() if value is not None and name != "loss"}
    standard_metrics = {name: value for name, value in metrics.items() if name in _USUAL}
    user_metrics = {name: value for name, value in metrics.items() if name not in _USUAL}
    return {
        "loss": values["loss"],
        **standard_metrics,
        **({"metrics": user_metrics} if user_metrics else {}),
    }


def missing_values_text(values: Mapping[str, float | None], job: Job) -> str:
    """Return a sentence about the values that one validation lacks; empty if it has all.

    Perplexity and accuracy count only where a key names them: most models have none.
    """
    keys = {job.checkpoint.best_metric: "checkpoint.best_metric"}
    if job.train.stop_patience > 0:
        keys[job.train.stop_metric] = "train.stop_metric"
    missing = [name for name, value in values.items() if value is None]
    named = [name for name in missing if name not in _USUAL or name in keys]
    if not named:
        return ""
    cause = "no validation sample has a target" if "loss" in named else "no sample counts for it"
    effect = "; ".join(f"{keys[name]} does not count this validation" for name in named if name in keys)
    return f"validation has no {' or '.join(named)}: {cause}{effect and '; '}{effect}"


def class_accuracy(output: Any, targets: Tensor) -> MetricValue:
    """Return the share of samples whose largest logit is that of their class; no count without classes."""
    targets = widen_integers(targets)
    right = correct_count(output, targets)
    return right, (targets != IGNORE_INDEX).sum() if isinstance(right, Tensor) else 0


def _weighted_sum_and_count(
    name: str, values: Tensor, weights: object
) -> tuple[Tensor | float, Tensor | float]:
    values = values.double()
    if weights is None:
        return values.sum(), float(values.numel())
    try:
        expanded = expand_weights(weights, values)
    except (TypeError, RuntimeError) as error:
        raise WanmaError(
            f"metric '{name}' returned a pair, but its second part is not a mask, weights or a count: "
            f"{error}",
            _RETURN_HINT,
        ) from error
    if expanded.dtype == torch.bool:
        return torch.where(expanded, values, 0.0).sum(), expanded.sum()
    return values.sum(), expanded.double().sum()


def _is_number(value: object) -> TypeGuard[Tensor | float]:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.ndim == 0)


def _per_position_error(name: str) -> WanmaError:
    return WanmaError(
        f"metric '{name}' does not return one value per position, but under parallel.cp a rank holds a "
        "part of each sequence",
        "return one value per position, or set parallel.cp = 1",
    )


def _select_rows(output: Any, selection: Tensor, rows: int) -> Any:
    """Return the kept rows of every tensor in a model's output that has as many rows."""
    if isinstance(output, Tensor):
        if output.ndim == 0:
            return output
        if len(output) != rows:
            raise WanmaError(
                f"metrics: the model's output has {len(output)} rows for {rows} samples, so its rows are "
                "not samples",
                "return an output with the samples in dim 0",
            )
        return output[selection]
    if isinstance(output, Mapping):
        parts = {key: _select_rows(value, selection, rows) for key, value in output.items()}
        return type(output)(**parts) if hasattr(output, "to_tuple") else parts
    if isinstance(output, tuple | list):
        items = [_select_rows(value, selection, rows) for value in output]
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    return output
