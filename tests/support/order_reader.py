"""Process that reads a data set as all ranks of a run, and prints (step, sample, row) of each sample.

Arguments: world size, first step, `data.shuffle`, `data.workers`.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from wanma.data.opening import open_dataset
from wanma.data.step_loader import StepLoader
from wanma.job.plan.plan import Plan
from wanma.job.sections.data import DataSection
from wanma.job.sections.train import TrainSection

TRAIN = TrainSection(steps=16, global_batch=9, batch_ramp=[(4, 7), (9, 12)], seed=5)
ROWS = 53


class Rows:
    """Dataset whose items are their own numbers."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return np.float32(index), index


def main(world_size: int, first_step: int, shuffle: Any, workers: int) -> None:
    section = DataSection(
        shuffle=shuffle, block_samples=8, window_blocks=3, validation_fraction=0, workers=workers
    )
    plan = Plan(dp_replicate=world_size, micro_batch=3)
    loaders = [
        StepLoader(open_dataset(section, TRAIN, Rows()), plan, TRAIN, rank, first_step, 2, workers)
        for rank in range(world_size)
    ]
    for step in range(first_step, TRAIN.steps):
        for loader in loaders:
            for batch in next(loader).micro_batches:
                samples, rows = batch.samples[batch.real], batch.targets[batch.real]
                for sample, row in zip(samples.tolist(), rows.tolist(), strict=True):
                    print(step, sample, row, flush=True)
    print("end", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
