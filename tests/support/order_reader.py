"""Process that reads stored records as all ranks of a run, and prints (step, sample, row) of each sample.

Arguments: folder of the records, world size, first step, `data.shuffle`, `data.workers`. Several workers are
loader processes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from support.killed_runs import order_keys
from wanma.data.index.records import open_records
from wanma.data.opening import open_dataset
from wanma.data.step_loader import StepLoader
from wanma.job.plan.plan import Plan
from wanma.job.sections.data import DataSection
from wanma.job.sections.train import TrainSection

RUN = TrainSection(steps=16, global_batch=9, batch_ramp=[(4, 7), (9, 12)], seed=5)
ROWS = 53


class Rows:
    """Dataset whose items are their own numbers."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return np.float32(index), index


class StoredRows(Rows):
    """Dataset of stored records, whose field `row` is their number."""

    def __init__(self, folder: Path) -> None:
        self.records = open_records(str(folder), cache=folder.with_name("cache"))

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return np.float32(index), int(self.records[index]["row"])


def main(folder: Path, world_size: int, first_step: int, shuffle: Any, workers: int) -> None:
    section = DataSection(**order_keys(shuffle), workers=workers, worker_processes=workers > 1)
    plan = Plan(dp_replicate=world_size, micro_batch=3)
    loaders = [
        StepLoader(open_dataset(section, RUN, StoredRows(folder)), plan, RUN, rank, first_step, 2, workers)
        for rank in range(world_size)
    ]
    for step in range(first_step, RUN.steps):
        for loader in loaders:
            for batch in next(loader).micro_batches:
                samples, rows = batch.samples[batch.real], batch.targets[batch.real]
                for sample, row in zip(samples.tolist(), rows.tolist(), strict=True):
                    print(step, sample, row, flush=True)
    print("end", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
