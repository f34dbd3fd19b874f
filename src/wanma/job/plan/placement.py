"""Placement of replicas and their pipeline stages on heterogeneous nodes, as pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wanma.job.sections.parallel import Recompute


@dataclass(frozen=True)
class StagePlacement:
    """Placement of one pipeline stage of a replica: `tp` devices of one node."""

    node: int
    """Node group: index into `Cluster.nodes`."""
    blocks: int
    """Blocks of the model in this stage.

    The first stage also holds the layers before the blocks, the last one those after them."""
    tp: int = 1


@dataclass(frozen=True)
class ReplicaPlacement:
    """Equal replicas of the model, with the placement of their stages.

    Replicas need nothing of each other between steps, so that replicas on unlike nodes may have stages,
    micro-batches and recompute of their own.
    """

    count: int
    places: tuple[StagePlacement, ...]
    """Placement of each stage, in the model's order."""
    micro_batch: int = 1
    """Maximum samples of a micro-batch, as in `Plan.micro_batch`."""
    recompute: Recompute = "none"
    """Recompute of all blocks, as in `Plan.recompute`."""

    def __post_init__(self) -> None:
        if self.count < 1 or self.micro_batch < 1 or not self.places:
            raise ValueError(f"replicas need a count, a micro-batch and at least one stage: {self}")
        if any(stage.tp < 1 or stage.blocks < 0 or stage.node < 0 for stage in self.places):
            raise ValueError(f"a stage is some blocks on at least one device of a kind of machine: {self}")

    @property
    def device_count(self) -> int:
        """Devices of all replicas."""
        return self.count * sum(stage.tp for stage in self.places)

    @property
    def stage_cuts(self) -> tuple[int, ...]:
        """First block of every stage but the first, as in `Plan.stage_cuts`."""
        cuts: list[int] = []
        for stage in self.places[:-1]:
            cuts.append((cuts[-1] if cuts else 0) + stage.blocks)
        return tuple(cuts)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ReplicaPlacement:
        return cls(**{**value, "places": tuple(StagePlacement(**stage) for stage in value["places"])})
