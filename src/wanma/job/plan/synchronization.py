"""Cross-site synchronization as pure data: method and schedule of exchanges between groups of replicas.

Within a site, ranks synchronize at every step, exactly. Sites are joined by slow links, and three methods use
them less; none computes the same as a synchronous step:

    local_sgd   each site trains alone, and every so many steps all take the mean of their weights
                (Stich 2018; after some synchronous steps: Lin et al. 2018)
    diloco      the same, but the sites' mean change is a pseudo-gradient of an outer optimizer
                (Douillard et al. 2023); fragments of the model in turn, overlapped with the next steps
                (Douillard et al. 2025)
    delayed     delayed gradients: summed over the sites during the next steps, and applied that much later
                (Ho et al. 2013, with every delay at its bound, so that a run repeats)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from wanma.job.file.renamed_keys import VALUES
from wanma.job.sections.parallel import OuterCompression, OuterOffload, SyncMethod

_BLOCK = re.compile(r"^(?:\w+\.)*?\d+(?=\.)")
"""Pattern of a block's path: 'layers.3' of 'layers.3.attention.query.weight'."""

_RENAMED = {"rate": "outer_learning_rate", "mix": "overlap_mixing_factor"}
"""Renamed fields, old to new, in the plans of older runs."""
_KEYS = {
    "kind": "parallel.synchronize",
    "compression": "parallel.outer_compression",
    "offload": "parallel.outer_offload",
}
"""Keys of the job file whose values, some of them renamed, the fields hold."""


@dataclass(frozen=True)
class Synchronization:
    """Synchronization between sites instead of a sum of gradients at every step."""

    kind: SyncMethod
    sites: int = 1
    every: int = 1
    """Steps between two synchronizations of a fragment (H of DiLoCo)."""
    synchronous_steps: int = 0
    """First steps of the run, in which gradients are summed over the sites."""
    outer_learning_rate: float = 1.0
    """Learning rate of the outer optimizer; 1 with no momentum gives the mean of the sites' weights."""
    momentum: float = 0.0
    """Nesterov momentum of the outer optimizer."""
    fragments: int = 1
    """Parts of the model that are synchronized in turn."""
    overlap_steps: int = 0
    """Steps during which a fragment's exchange runs in the background (τ of Streaming DiLoCo)."""
    overlap_mixing_factor: float = 0.0
    """Share of its own weights that a site keeps when a background exchange arrives (α), 0 .. 1."""
    staleness: int = 0
    """Steps by which delayed gradients are applied late."""
    compression: OuterCompression = "none"
    """Compression of the tensors exchanged between sites."""
    offload: OuterOffload = "none"
    """Offload target of the outer weights and their momentum."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Synchronization:
        """Build a synchronization from the JSON of a plan, also of an older release."""
        values = {_RENAMED.get(name, name): value for name, value in value.items()}
        for name, key in _KEYS.items():
            if name in values:
                values[name] = VALUES[key].get(values[name], values[name])
        return cls(**values)

    def __post_init__(self) -> None:
        if min(self.sites, self.every, self.fragments) < 1:
            raise ValueError(f"sites, steps between synchronizations and fragments are at least 1: {self}")
        if min(self.synchronous_steps, self.overlap_steps, self.staleness) < 0:
            raise ValueError(f"numbers of steps are not negative: {self}")
        if self.has_local_weights and self.fragments > self.every:
            raise ValueError(f"{self.fragments} fragments in turn need as many steps, not {self.every}")
        if self.has_local_weights and self.overlap_steps >= self.every:
            raise ValueError(
                f"an exchange that takes {self.overlap_steps} of {self.every} steps meets the next"
            )

    @property
    def has_local_weights(self) -> bool:
        """True if sites have weights of their own between synchronizations."""
        return self.kind != "delayed"

    def is_synchronous_step(self, step: int) -> bool:
        """Return True if all sites take `step`, counted from 1, together."""
        return self.has_local_weights and step <= self.synchronous_steps

    def fragments_to_exchange(self, step: int) -> list[int]:
        """Return the fragments whose exchange begins after `step`, counted from 1.

        Each fragment is exchanged every so many steps, as far from the others as possible (Douillard et al.
        2025, section 2.2).
        """
        local_steps = step - self.synchronous_steps
        if local_steps < 1:
            return []
        offsets = ((fragment, fragment * self.every // self.fragments) for fragment in range(self.fragments))
        return [fragment for fragment, offset in offsets if (local_steps + offset) % self.every == 0]

    def assign_fragments(self, names: Iterable[str]) -> dict[str, int]:
        """Return the fragment of each parameter: units in turn, so that a fragment has some of every depth.

        This is the strided pattern of Douillard et al. 2025, section 3.

        Args:
            names: names of all parameters of the model, in its order. A unit is a block, or the consecutive
                parameters between blocks: the embedding, the head.
        """
        fragments: dict[str, int] = {}
        unit, previous_block = -1, None
        for name in names:
            block = match[0] if (match := _BLOCK.match(name)) else ""
            if block != previous_block:
                unit, previous_block = unit + 1, block
            fragments[name] = unit % self.fragments
        return fragments

    def __str__(self) -> str:
        """Return a text such as 'diloco between 2 sites every 100 steps'."""
        sites = f"{self.sites} site" + ("s" if self.sites > 1 else "")
        if not self.has_local_weights:
            delay_text = f"{self.staleness} step" + ("" if self.staleness == 1 else "s")
            return f"gradients of {sites} delayed by {delay_text}"
        parts = f" in {self.fragments} fragments" if self.fragments > 1 else ""
        overlap_text = f", overlapped with {self.overlap_steps} steps" if self.overlap_steps else ""
        warmup_text = f", after {self.synchronous_steps} synchronous steps" if self.synchronous_steps else ""
        return f"{self.kind} between {sites} every {self.every} steps{parts}{overlap_text}{warmup_text}"
