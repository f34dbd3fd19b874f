"""Training of a job from Python, with the user's own model, data and loss if given (`wanma.train`)."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanma.api.run.callback_thread import check_callbacks
from wanma.api.run.job_run import train_job
from wanma.api.run.model_override import override_model_name
from wanma.api.run.run_records import resolve_run_directory
from wanma.api.run.user_update import check_user_optimizer
from wanma.checkpoint.store.checkpoint_folder import list_committed
from wanma.data.data_kinds import with_data_kinds
from wanma.engines.launchers.job_placement import place_job
from wanma.engines.launchers.launcher_placement import LauncherPlacement
from wanma.engines.launchers.node_leader import mark_output_as_forwarded, release_default_binding
from wanma.engines.launchers.placement import read_placement
from wanma.job.callbacks import Callback
from wanma.job.errors import JobError, WanmaError
from wanma.job.file.loading import to_job
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import WorkerContext, current_worker_context
from wanma.job.sections.job import Job

if TYPE_CHECKING:
    from torch import Tensor, nn

    from wanma.report.run_report import Report


@dataclass(frozen=True)
class Result:
    """Result of a training."""

    run: RunDirectory
    exit_code: int
    """Exit code; 0: finished, 130 or 143: stopped on request, the same call continues the run."""

    @property
    def report(self) -> Report:
        """Report of the run, read from the run directory."""
        from wanma.report.run_report import read_report

        return read_report(self.run)

    def weights(self) -> dict[str, Tensor]:
        """Return the full parameters and buffers of the newest checkpoint, on CPU, by the model's own names.

        A damaged checkpoint is skipped, with a warning.

        Raises:
            WanmaError: there is no complete checkpoint.
        """
        from wanma.checkpoint.load.reader import load_full_tensors
        from wanma.checkpoint.load.verification import find_valid

        path = find_valid(self.run.checkpoints, None, warnings.warn)
        return {
            name.removeprefix("model."): tensor
            for name, tensor in load_full_tensors(path).items()
            if name.startswith("model.")
        }


def train(
    job: Job | Mapping[str, Any] | str | Path,
    *,
    model: nn.Module | None = None,
    data: Any = None,
    loss: Any = None,
    metrics: Mapping[str, Any] | None = None,
    optimizer: Any = None,
    schedule: Any = None,
    callbacks: Sequence[Callback] = (),
    overrides: Sequence[str] = (),
    run_directory: Path | str | None = None,
) -> Result:
    """Train `job` and wait for its end; the same as `wanma train`, in separate processes.

    Args:
        job: a job, its sections as nested mappings, or the path of a job file.
        model: a plain module instead of `[model]`; afterwards it holds the weights of the newest checkpoint.
        data: a map-style dataset, or a pair (training, validation), instead of `[data]`.
        loss: function (output, targets) -> one loss per target (reduction="none"); default: cross entropy.
        metrics: validation metrics by name: functions (output, targets) -> one value per sample or target,
            whose mean is taken; or (values, mask), (values, weights), (sum, count).
        optimizer: function or class that makes a torch.optim.Optimizer of parameter groups.
        schedule: function (step) or (step, steps) -> share of `train.learning_rate`; steps count from 0.
        callbacks: called in this process during the run.
        overrides: 'train.steps=500' and so on.
        run_directory: default: `observe.runs` / `observe.name`. An unfinished run there is continued.

    Raises:
        WanmaError: the job is wrong, or the training failed; the message is the failing rank's.
    """
    placement = read_placement()
    _require_no_rank(placement)
    _check_objects(model, data, loss, metrics)
    callbacks = check_callbacks(callbacks)
    if model is not None:
        kind = type(model)
        overrides = override_model_name(job, overrides, f"{kind.__module__}:{kind.__qualname__}")
    job = with_data_kinds(to_job(job, overrides))
    if placement is not None:
        mark_output_as_forwarded(placement)
        release_default_binding(placement)
        job = place_job(job, placement)
    run = resolve_run_directory(job, run_directory)
    objects = {
        "model": model,
        "data": data,
        "loss": loss,
        "metrics": metrics,
        **check_user_optimizer(job, optimizer, schedule),
    }
    failures: list[str] = []
    exit_code = train_job(
        job,
        run_directory=run.path,
        command_line=sys.argv,
        user_objects={name: value for name, value in objects.items() if value is not None},
        callbacks=callbacks,
        on_failure=failures.append,
    )
    if failures:
        raise WanmaError(failures[0], exit_code=exit_code)
    result = Result(run, exit_code)
    if model is not None and (exit_code == 0 or list_committed(run.checkpoints)):
        # A run that was stopped before its first checkpoint leaves the module as it was.
        from wanma.training.checkpointing.run_identity import record_returned_weights

        _copy_weights(model, result.weights())
        record_returned_weights(run, model)
    return result


def _require_no_rank(placement: LauncherPlacement | None) -> None:
    """Refuse a process that is a rank: each would start ranks, and all would train in one run directory.

    The only process that a launcher has started on its node is none: it starts the node's ranks.
    """
    known: WorkerContext | LauncherPlacement
    if (worker := current_worker_context.get()) is not None:
        known, starter = worker, "`wanma launch`"
    elif placement is not None and placement.local_world_size > 1:
        known, starter = placement, placement.launcher
    else:
        return
    raise JobError(
        f"wanma.train starts ranks itself, but {starter} started this process as rank "
        f"{known.rank} of {known.world_size}",
        "run the script with `python`; the job's [parallel] sets the number of ranks. To use "
        "the ranks of a launcher, write a loop with wanma.session",
    )


def _check_objects(model: Any, data: Any, loss: Any, metrics: Any) -> None:
    """Refuse, before anything starts, objects that cannot be a model, a dataset, a loss or metrics."""
    if model is not None:
        from wanma.models.user_modules.validation import validate_module

        validate_module(model)
    if data is not None:
        from wanma.data.datasets.map_dataset import check_dataset

        check_dataset(data)
    if loss is not None:
        from wanma.training.loss.user_loss import check_loss

        check_loss(loss)
    if metrics is not None:
        from wanma.training.loss.validation_metrics import check_metrics

        check_metrics(metrics)


def _copy_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy the trained weights into the user's module, in place; of tied ones only the first name was saved.

    `load_state_dict` is not used: it needs the other state of a module (`get_extra_state`), and a module may
    read that in its own way.
    """
    import torch

    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name not in weights:
                continue
            if tensor.shape == weights[name].shape:
                tensor.copy_(weights[name])
            else:  # a buffer that a forward replaced
                tensor.data = weights[name].to(tensor)
