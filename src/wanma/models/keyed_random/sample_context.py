"""Sample context: base class of modules whose forward depends on the samples of its rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn


class SampleDependentModule(nn.Module, ABC):
    """Module that gets the samples of a forward from `dropout.bind_samples`, also when it is recomputed."""

    @abstractmethod
    def build_sample_context(self, seed: int, sample_indices: Tensor, positions: Tensor | None) -> Any:
        """Return the module's state for samples while they are computed.

        Args:
            seed: the job's.
            sample_indices: (rows,) int64, each row's index in the run's sample order; -1 for padding rows.
            positions: (columns,) int64, indices of the columns if the module sees only a part of dim 1.
        """

    sample_context: Any
    """State from `build_sample_context` during the forward; the module may change it as it computes."""
