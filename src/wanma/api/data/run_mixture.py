"""Mixture that a run has seen, by its records: position in the data, and samples of each source."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from wanma.checkpoint.store.checkpoint_folder import list_committed
from wanma.data.sampling.batch_size_schedule import samples_consumed_before
from wanma.data.sampling.seen_mixture import SeenSource, seen_mixture
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.file.loading import load_recorded_job
from wanma.job.run.run_directory import RunDirectory
from wanma.job.sections.job import Job
from wanma.report.run_report import read_report


@dataclass(frozen=True)
class RunMixture:
    """Samples that a run has consumed, by source."""

    run: str
    step: int
    """Optimizer steps done."""
    samples: int
    """Samples consumed by them."""
    checkpoint_step: int | None
    """Step of the newest checkpoint; None: there is none."""
    checkpoint_samples: int
    """Position of the newest checkpoint in the data."""
    sources: tuple[SeenSource, ...]
    epochs: Mapping[str, float] = field(default_factory=dict)
    """Epochs of each source, where they were asked for."""


def run_mixture(run: RunDirectory, *, count_epochs: bool = False) -> RunMixture:
    """Return the mixture that a run has seen until its last recorded step.

    Args:
        run: the run.
        count_epochs: open the data, which tells the size of an epoch of each source.

    Raises:
        JobError: the job of the run cannot be read.
        WanmaError: the run has recorded no step and has no checkpoint, or its data cannot be opened.
    """
    job = load_recorded_job(run.job)
    report = read_report(run, tail_only=True)
    steps = [step for step, _ in list_committed(run.checkpoints)] if run.checkpoints.is_dir() else []
    newest = max(steps, default=None)
    step = max(report.last_step, newest or 0)
    if not step:
        raise WanmaError(f"the run {run.name} has done no step yet", "train it first", EXIT_USAGE)
    samples = samples_consumed_before(job.train, step)
    sources = tuple(seen_mixture(job.data, samples))
    return RunMixture(
        run.name,
        step,
        samples,
        newest,
        0 if newest is None else samples_consumed_before(job.train, newest),
        sources,
        _epochs(run, job, sources) if count_epochs else {},
    )


def _epochs(run: RunDirectory, job: Job, sources: tuple[SeenSource, ...]) -> dict[str, float]:
    """Return how often the samples of each source were seen, on average."""
    from wanma.data.opening import open_dataset

    if job.data.placement == "parts":  # this node may have only some of them
        sizes: tuple[int, ...] = (_recorded_samples(run),)
    else:
        dataset = open_dataset(job.data, job.train)
        sizes = (dataset.train_samples,) if dataset.order is None else dataset.order.epoch_sizes
    return {one.name: one.samples / max(size, 1) for one, size in zip(sources, sizes, strict=True)}


def _recorded_samples(run: RunDirectory) -> int:
    """Return the training samples of all parts of the data, by the record of the run."""
    try:
        parts = json.loads(run.data_parts.read_text(encoding="utf-8"))
        return sum(int(part["train_samples"]) for part in parts)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WanmaError(f"{run.data_parts} cannot be read: {error}", "leave out --epochs") from error


def mixture_json(found: RunMixture) -> dict[str, Any]:
    """Return the mixture as JSON."""
    return {**asdict(found), "epochs": dict(found.epochs)}
