"""How seldom groups of replicas, here called sites, hear of each other: pure data, and its calendar.

Within a site ranks agree at every step, exactly. Between sites there are slow links, and three ways to use
them less, none of which computes what a step that everybody agrees on would:

    local_sgd   each site goes on by itself, and every so many steps all take the mean of their weights
                (Stich 2018; after some steps that all take together: Lin et al. 2018)
    diloco      likewise, but what the sites have moved on average is a gradient to an outer optimizer
                (Douillard et al. 2023); fragments of the model in turn, and beside the next steps
                (Douillard et al. 2025)
    stale       gradients are summed over the sites beside the next steps, and applied so many steps late
                (Ho et al. 2013, with every delay at its bound, so that a run repeats)
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from wanma.job.sections.parallel import OuterCompression, OuterPlace, SiteKind

_BLOCK = re.compile(r"^(?:\w+\.)*?\d+(?=\.)")
"""'layers.3' of 'layers.3.attention.query.weight'."""


@dataclass(frozen=True)
class Synchronization:
    """What sites do instead of summing gradients at every step."""

    kind: SiteKind
    sites: int = 1
    every: int = 1
    """Steps from one synchronisation of a fragment to the next (H of DiLoCo)."""
    synchronous_steps: int = 0
    """First steps, whose gradients are summed over the sites."""
    rate: float = 1.0
    """Of the outer update; 1 with no momentum is the mean of the sites' weights."""
    momentum: float = 0.0
    """Of the outer update, after Nesterov."""
    fragments: int = 1
    """Parts of the model, which are synchronised in turn."""
    overlap_steps: int = 0
    """That a fragment's exchange may take, beside them (τ of Streaming DiLoCo)."""
    mix: float = 0.0
    """What a site keeps of its own weights where an exchange has come back beside its steps (α)."""
    staleness: int = 0
    """Steps by which gradients are late."""
    compression: OuterCompression = "nothing"
    """Of what travels between sites."""
    offload: OuterPlace = "nothing"
    """Where the outer weights and their momentum wait."""

    def __post_init__(self) -> None:
        if min(self.sites, self.every, self.fragments) < 1:
            raise ValueError(f"sites, steps between synchronisations and fragments are at least 1: {self}")
        if min(self.synchronous_steps, self.overlap_steps, self.staleness) < 0:
            raise ValueError(f"numbers of steps are not negative: {self}")
        if self.is_local and self.fragments > self.every:
            raise ValueError(f"{self.fragments} fragments in turn need as many steps, not {self.every}")
        if self.is_local and self.overlap_steps >= self.every:
            raise ValueError(
                f"an exchange that takes {self.overlap_steps} of {self.every} steps meets the next"
            )

    @property
    def is_local(self) -> bool:
        """Whether sites have weights of their own between synchronisations."""
        return self.kind != "stale"

    def is_synchronous(self, step: int) -> bool:
        """Whether all sites take `step`, counted from 1, together."""
        return self.is_local and step <= self.synchronous_steps

    def due(self, step: int) -> list[int]:
        """Fragments whose exchange begins after `step`, counted from 1.

        Each every so many steps, as far from each other as can be (Douillard et al. 2025, section 2.2).
        """
        since = step - self.synchronous_steps
        if since < 1:
            return []
        offsets = ((fragment, fragment * self.every // self.fragments) for fragment in range(self.fragments))
        return [fragment for fragment, offset in offsets if (since + offset) % self.every == 0]

    def fragment_by_name(self, names: Iterable[str]) -> dict[str, int]:
        """Which fragment each parameter belongs to: units in turn, so that each fragment has some from every
        depth (the strided pattern of Douillard et al. 2025, section 3).

        Args:
            names: of the whole model's parameters, in its order. A unit is a block, or what neighbours
                between blocks: the embedding, the head.
        """
        found: dict[str, int] = {}
        unit, before = -1, None
        for name in names:
            block = match[0] if (match := _BLOCK.match(name)) else ""
            if block != before:
                unit, before = unit + 1, block
            found[name] = unit % self.fragments
        return found

    def __str__(self) -> str:
        """'diloco between 2 sites every 100 steps'."""
        sites = f"{self.sites} site" + ("s" if self.sites > 1 else "")
        if not self.is_local:
            late = f"{self.staleness} step" + ("" if self.staleness == 1 else "s")
            return f"gradients of {sites} {late} late"
        parts = f" in {self.fragments} fragments" if self.fragments > 1 else ""
        beside = f", beside {self.overlap_steps} steps" if self.overlap_steps else ""
        after = f", after {self.synchronous_steps} steps together" if self.synchronous_steps else ""
        return f"{self.kind} between {sites} every {self.every} steps{parts}{beside}{after}"
