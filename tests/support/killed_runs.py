"""Law 2 checked: the data of runs that end anywhere, each with other ranks, beside the plain reference."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

from support.reference_order import permuted, reference_order, stream
from wanma.data.batch import Batch
from wanma.data.datasets.dataset import BatchedDataset
from wanma.data.sampling.batch_size_schedule import samples_consumed_before
from wanma.data.step_loader import StepLoader
from wanma.job.plan.plan import Plan
from wanma.job.sections.train import TrainSection

TRAIN = TrainSection(steps=9, global_batch=16, batch_ramp=[(2, 5), (4, 9)], seed=5)
TOTAL = samples_consumed_before(TRAIN, TRAIN.steps)
BLOCK, WINDOW = 3, 2
SHUFFLES = ("full", "block", "none")
MIXTURES: dict[str, list[tuple[int, list[int]]]] = {
    "static": [(0, [7, 2, 1])],
    "curriculum": [(0, [7, 2, 1]), (40, [1, 0, 3]), (71, [0, 1, 1])],
}
"""Stages of three sources: (first sample, weights)."""
WORLD_SIZES = (1, 2, 3, 4, 8)


def order_keys(shuffle: str) -> dict[str, Any]:
    """Keys of `[data]` of a shuffle, without a validation split."""
    keys = {"shuffle": shuffle, "block_samples": BLOCK, "window_blocks": WINDOW}
    return {**keys, "validation_fraction": 0}


def source_weights(stages: Sequence[tuple[int, Sequence[int]]]) -> list[list[tuple[int, float]]]:
    """The weight of each source, as `data.sources` has it."""
    return [[(start, float(weights[n])) for start, weights in stages] for n in range(len(stages[0][1]))]


def numbered_rows(count: int, shuffle: str) -> list[int]:
    """The rows of a source that a holdout numbers: by a hash, unless neighbours are read together."""
    rows = list(range(count))
    return permuted(rows, "validation split") if shuffle == "full" else rows


def expected_rows(count: int, shuffle: str, total: int = TOTAL) -> list[int]:
    """The rows of one source in the order of the reference."""
    rows = numbered_rows(count, shuffle)
    return [rows[row] for row in itertools.islice(stream(count, shuffle, BLOCK, WINDOW, TRAIN.seed), total)]


def expected_mixture(
    sizes: Sequence[int], stages: Sequence[tuple[int, Sequence[int]]], shuffle: str
) -> list[tuple[int, int]]:
    """(source, row) of a mixture of sources in the order of the reference."""
    rows = [numbered_rows(size, shuffle) for size in sizes]
    order = reference_order(sizes, stages, (shuffle, BLOCK, WINDOW), TRAIN.seed, TOTAL)
    return [(source, rows[source][row]) for source, row in order]


def targets_of(batch: Batch) -> list[Any]:
    """Targets of the rows of a batch."""
    return [tuple(row) if isinstance(row, list) else row for row in batch.targets.tolist()]


def read_with_kills(
    open_data: Callable[[], BatchedDataset],
    train: TrainSection = TRAIN,
    worlds: Sequence[int] = (3, 1, 4),
    threads: int = 1,
    seed: int = 0,
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
