"""Where the replicas of a plan on mixed hardware are placed, as pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wanma.job.sections.parallel import Recompute


@dataclass(frozen=True)
class Place:
    """One pipeline stage of a replica: `tp` devices of one machine."""

    node: int
    """Kind of machine: index into `Cluster.nodes`."""
    blocks: int
    """Of the model, those that this stage holds; the first one also holds what comes before the blocks, and
    the last one what comes after them."""
    tp: int = 1


@dataclass(frozen=True)
class Replicas:
    """Equal replicas of the model. Between steps they need nothing of others, so that unlike ones may have
    stages, micro-batches and recompute of their own."""

    count: int
    places: tuple[Place, ...]
    """Stages in the model's order."""
    micro_batch: int = 1
    """As `Plan.micro_batch`."""
    recompute: Recompute = "none"
    """As `Plan.recompute`, of all blocks."""

    def __post_init__(self) -> None:
        if self.count < 1 or self.micro_batch < 1 or not self.places:
            raise ValueError(f"replicas need a count, a micro-batch and at least one stage: {self}")
        if any(place.tp < 1 or place.blocks < 0 or place.node < 0 for place in self.places):
            raise ValueError(f"a stage is some blocks on at least one device of a kind of machine: {self}")

    @property
    def devices(self) -> int:
        """Of all of them."""
        return self.count * sum(place.tp for place in self.places)

    @property
    def stage_cuts(self) -> tuple[int, ...]:
        """As `Plan.stage_cuts`."""
        cuts: list[int] = []
        for place in self.places[:-1]:
            cuts.append((cuts[-1] if cuts else 0) + place.blocks)
        return tuple(cuts)

    def devices_on(self, node: int) -> int:
        """Of them, those of one kind of machine."""
        return self.count * sum(place.tp for place in self.places if place.node == node)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Replicas:
        return cls(**{**value, "places": tuple(Place(**place) for place in value["places"])})
