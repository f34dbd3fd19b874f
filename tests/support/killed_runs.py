"""Reading of a run's data by several runs that end anywhere, each with other ranks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

from wanma.data.batch import Batch
from wanma.data.datasets.dataset import BatchedDataset
from wanma.data.step_loader import StepLoader
from wanma.job.plan.plan import Plan
from wanma.job.sections.train import TrainSection


def targets_of(batch: Batch) -> list[Any]:
    """Targets of the rows of a batch."""
    return [tuple(row) if isinstance(row, list) else row for row in batch.targets.tolist()]


def read_with_kills(
    open_data: Callable[[], BatchedDataset],
    train: TrainSection,
    worlds: Sequence[int],
    threads: int,
    seed: int,
    contents_of: Callable[[Batch], list[Any]] = targets_of,
) -> list[tuple[int, Any]]:
    """(sample, content) of all steps, read by runs that end at random steps.

    Each run resumes at or before the end of the last one, with other ranks and micro-batches. A step that is
    read again must have the same samples.
    """
    draw = random.Random(seed)
    steps: dict[int, list[Any]] = {}
    resumed = 0
    for life, world in enumerate(worlds):
        is_last = life == len(worlds) - 1
        end = train.steps if is_last else draw.randint(resumed, train.steps)
        plan = Plan(dp_replicate=world, micro_batch=draw.randint(1, 5))
        ranks = [
            StepLoader(open_data(), plan, train, rank, resumed, draw.randint(1, 3), threads)
            for rank in range(world)
        ]
        for step in range(resumed, end):
            rows: list[Any] = []
            for loader in ranks:
                for batch in next(loader).micro_batches:
                    read = zip(batch.samples.tolist(), contents_of(batch), strict=True)
                    rows += itertools.compress(read, batch.real.tolist())
            assert steps.setdefault(step, rows) == rows
        for loader in ranks:
            loader.close()  # with steps read ahead, as a kill leaves them
        resumed = draw.randint(max(end - 3, 0), end)  # the newest checkpoint is some steps old
    return [row for step in range(train.steps) for row in steps[step]]
