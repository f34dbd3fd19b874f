"""Slowed-down tiny decoder that raises on request; for the soak test."""

from __future__ import annotations

import time
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from benchmarks.startup.model import TinyDecoder


class Paced(TinyDecoder):
    """Tiny decoder that waits for `pause_seconds` in each forward pass, which changes no number.

    Args:
        orders: folder in which a file with a rank's number makes that rank raise, once.
    """

    def __init__(self, pause_seconds: float, orders: str) -> None:
        super().__init__(sequence=32, hidden=32, heads=2, layers=2)
        self._pause_seconds, self._orders = pause_seconds, Path(orders)

    def forward(self, tokens: Tensor) -> Tensor:
        time.sleep(self._pause_seconds)
        mine = self._orders / str(dist.get_rank())
        if mine.exists():
            mine.unlink()
            raise RuntimeError("ordered by the soak")
        return super().forward(tokens)
