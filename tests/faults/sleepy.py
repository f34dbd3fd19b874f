"""A model, and data that one rank waits for forever; imported by the ranks of the jobs under test."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Numbers:
    """64 samples; the rank `asleep` gets no more of them after its first 40.

    Some of these are read before the first step.
    """

    def __init__(self, asleep: int) -> None:
        self.asleep, self.given = asleep, 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.given += 1
        if self.given > 40 and dist.get_rank() == self.asleep:
            self.read_slowly()
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return x, (x.sum() > 0).long()

    def read_slowly(self) -> None:
        time.sleep(1000)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
