"""How a job runs, as pure data: the sizes of the axes and everything the runtime must obey.

`Plan` also answers the three questions every room asks of it: who am I in the grid
(`coordinates`), which rows of the global batch are mine (`rows`), and in which micro-batches
(`micro_batches`). They are functions of the plan alone, so that tests need no processes.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from wanma.job.sections import Precision, Shard

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes, outermost first: the chattiest axis stays on the fastest links."""


@dataclass(frozen=True)
class Plan:
    """The layout of a run. `ep` subdivides the data axes and so is no factor of `world_size`."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    shard: Shard = "nothing"
    micro_batch: int = 1
    """Most samples in one forward pass of one data rank."""
    schedule: str = "1f1b"
    stage_cuts: tuple[int, ...] = ()
    """First block of every pipeline stage but the first."""
    recompute: str = "none"
    compile: bool = False
    precision: Precision = "fp32"
    device: str = "cpu"
    threads_per_rank: int = 1
    approximate: tuple[str, ...] = ()
    """Names of what changes the mathematics; empty for an exact plan."""

    @property
    def world_size(self) -> int:
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def data_ranks(self) -> int:
        """Ranks that read different samples: the two data-parallel axes."""
        return self.dp_replicate * self.dp_shard

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of `rank` on every axis of `AXES`."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} outside a world of {self.world_size}")
        position: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, position[axis] = divmod(rank, getattr(self, axis))
        return {axis: position[axis] for axis in AXES}

    def data_rank(self, rank: int) -> int:
        at = self.coordinates(rank)
        return at["dp_replicate"] * self.dp_shard + at["dp_shard"]

    def rows(self, global_batch: int, data_rank: int) -> range:
        """Rows of the global batch that `data_rank` computes: contiguous, sizes differ by one at most."""
        base, extra = divmod(global_batch, self.data_ranks)
        start = data_rank * base + min(data_rank, extra)
        return range(start, start + base + (data_rank < extra))

    def accumulation(self, global_batch: int) -> int:
        """Micro-batches per step: the same on every rank, because collectives run inside them."""
        largest = math.ceil(global_batch / self.data_ranks)
        return max(math.ceil(largest / self.micro_batch), 1)

    def micro_batches(self, global_batch: int, data_rank: int) -> list[range]:
        """This data rank's rows in `accumulation(global_batch)` runs; the last ones may be empty."""
        mine = self.rows(global_batch, data_rank)
        count = self.accumulation(global_batch)
        base, extra = divmod(len(mine), count)
        runs, start = [], mine.start
        for index in range(count):
            stop = start + base + (index < extra)
            runs.append(range(start, stop))
            start = stop
        return runs

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Plan:
        known = {f.name for f in fields(cls)}
        if unknown := set(value) - known:
            raise ValueError(f"unknown plan fields {sorted(unknown)}")
        tuples: dict[str, Any] = {
            key: tuple(value[key]) for key in ("stage_cuts", "approximate") if key in value
        }
        return cls(**{**value, **tuples})

    def __str__(self) -> str:
        axes = " × ".join(
            f"{axis} {getattr(self, axis)}" for axis in (*AXES, "ep") if getattr(self, axis) > 1
        )
        ranks = "rank" if self.world_size == 1 else "ranks"
        sharded = "" if self.shard == "nothing" else f", {self.shard} sharded"
        return (
            f"{self.world_size} {ranks} ({axes or 'one process'}){sharded}, {self.precision}, {self.device}"
        )
