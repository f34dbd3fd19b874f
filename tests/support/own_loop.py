"""A user's own training loop around `wanma.session`, as each rank runs it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.nn.functional as F

import wanma
from support.own import Numbers, Plain, seeded
from wanma.job.worker import Worker, current_worker


def loop(job: dict[str, Any], run_directory: Path | None = None) -> list[int]:
    """Train; returns the samples that this process computed, in order."""
    seen: list[int] = []
    with wanma.session(job, run_directory=run_directory) as session:
        model = session.prepare(seeded(Plain))
        for batch in session.batches(Numbers()):
            seen += batch.samples[batch.real].tolist()
            losses = F.cross_entropy(model(*batch.inputs), batch.targets, reduction="none", ignore_index=-100)
            session.step(losses)
    return seen


def loop_in_rank(worker: Worker, job: dict[str, Any], run_directory: Path) -> list[int]:
    """`loop` as a process that `wanma launch` started."""
    current_worker.set(replace(worker, run_directory=run_directory))
    return loop(job)
