"""A dataset's random numbers are a function of (seed, sample), whoever reads it and in which order."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from wanma.data.datasets.map_dataset import wrap_user_dataset
from wanma.job.sections.data import DataSection


class Augmented:
    """Draws from all three generators, torch's in its several ways; not for each sample if `seldom`."""

    def __init__(self, seldom: bool = False) -> None:
        self.seldom = seldom

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.seldom and index % 5:
            return torch.zeros(7), 0
        x = torch.rand(2)
        time.sleep(0.001)  # other threads come in between
        y = torch.cat([x, torch.randn_like(x), torch.empty(1).uniform_(1, 2)])
        return torch.cat([y, torch.tensor([np.random.rand(), random.random()])]), 0


def rows(workers: int, batches: list[list[int]], seldom: bool = False, seed: int = 3) -> dict[int, Tensor]:
    data = wrap_user_dataset(Augmented(seldom), DataSection(workers=workers, validation_fraction=0), seed, 64)
    with ThreadPoolExecutor(workers) as threads:
        read = list(threads.map(data.batch, batches))
    return {
        number: row
        for numbers, batch in zip(batches, read, strict=True)
        for number, row in zip(numbers, batch.inputs[0], strict=True)
    }


@pytest.mark.parametrize("seldom", [False, True])
def test_draws_depend_on_seed_and_sample_alone(seldom: bool) -> None:
    generators = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    one = rows(1, [list(range(32))], seldom)
    for workers, size in ((1, 5), (4, 3)):
        numbers = [list(range(first, min(first + size, 32))) for first in range(0, 32, size)]
        other = rows(workers, numbers[::-1], seldom)
        assert all(torch.equal(other[number], row) for number, row in one.items())
    assert torch.equal(torch.get_rng_state(), generators[0])
    if not seldom:  # else some are drawn before it is known that they must be seeded
        assert (np.random.get_state()[1].tolist(), random.getstate()) == generators[1:]
        assert len({tuple(row.tolist()) for row in one.values()}) == 32
        assert not torch.equal(rows(1, [[0]], seed=4)[0], one[0])
