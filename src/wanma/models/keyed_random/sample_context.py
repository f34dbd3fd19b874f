"""Modules whose forward depends on which samples its rows are, and how they are told."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn


class SampleAware(nn.Module, ABC):
    """Told by `dropout.keyed_samples` which samples a forward computes, also when backward runs it again."""

    @abstractmethod
    def announcement(self, seed: int, samples: Tensor, positions: Tensor | None) -> Any:
        """What the module wants to remember of the samples while they are computed.

        Args:
            seed: the job's.
            samples: (rows,) int64, each row's position in the run's sample order; -1 for padding rows.
            positions: (columns,) int64, where the module sees only a part of dim 1: which part.
        """

    announced: Any
    """What `announcement` gave, during the forward; the module may change it as it computes."""
