"""A user's own training loop around `wanma.session`, as each rank runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wanma
from support.own import Numbers, Plain, seeded
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import WorkerContext, current_worker_context


def session_job(**sections: Any) -> dict[str, Any]:
    """Four steps of seven samples in fp64; keyword arguments replace sections, but `train` is added to."""
    train = {
        "precision": "fp64",
        "steps": 4,
        "global_batch": 7,
        "learning_rate": 1e-2,
        "validation_samples": 4,
        **sections.pop("train", {}),
    }
    return {
        "model": {"factory": "support.own:Plain"},
        "train": train,
        "checkpoint": {"every_steps": 0},
        "observe": {"console": "quiet"},
        **sections,
    }


def per_sample(model: nn.Module, batch: wanma.Batch) -> Tensor:
    """The losses of a batch."""
    return F.cross_entropy(model(*batch.inputs), batch.targets, reduction="none", ignore_index=-100)


def loop(job: dict[str, Any], run_directory: Path | None = None, validates: bool = False) -> list[int]:
    """Train; returns the samples that this process computed, in order."""
    seen: list[int] = []
    with wanma.session(job, run_directory=run_directory) as session:
        model = session.prepare(seeded(Plain))

        def losses(batch: wanma.Batch) -> Tensor:
            return per_sample(model, batch)

        for batch in session.batches(Numbers(), validate=losses if validates else None):
            seen += batch.samples[batch.real].tolist()
            session.step(losses(batch))
    return seen


def loop_in_rank(worker: WorkerContext, job: dict[str, Any], run_directory: Path, *more: Any) -> list[int]:
    """`loop` as a process that `wanma launch` started."""
    with started_by_launch(worker, run_directory):
        return loop(job, None, *more)


@contextmanager
def started_by_launch(worker: WorkerContext, run_directory: Path, **fields: Any) -> Iterator[None]:
    """Let this process be a rank that `wanma launch` started; leaves no change, so that it can be reused."""
    RunDirectory(run_directory).create()
    threads = torch.get_num_threads()
    token = current_worker_context.set(replace(worker, run_directory=run_directory, **fields))
    try:
        yield
    finally:
        current_worker_context.reset(token)
        torch.set_num_threads(threads)
