"""A rank that is slow in its own work, and what ranks tell of their work."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from wanma.job.run.worker import NullSupervisorClient, StepWork
from wanma.models.architectures.decoder import Block

SECONDS = 0.15
"""Delay of the slow rank in every forward of a block."""


class Noting(NullSupervisorClient):
    """Keeps what a rank says it took for itself in each step: (group, compute seconds)."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def report_work(self, work: StepWork) -> None:
        with self._path.open("a") as notes:
            notes.write(f"{work.peer_group} {work.compute_seconds}\n")


def noted(path: Path) -> list[tuple[int, float]]:
    """Records of `Noting`."""
    return [(int(group), float(seconds)) for group, seconds in map(str.split, path.read_text().splitlines())]


def last_rank_sleeps() -> None:
    """In each block's forward; the others wait for it wherever they next meet it."""
    forward = Block.forward

    def slow(self: Block, *arguments: Any, **keywords: Any) -> Any:
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(SECONDS)
        return forward(self, *arguments, **keywords)

    Block.forward = slow  # type: ignore[method-assign]  # a test's
