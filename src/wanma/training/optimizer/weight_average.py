"""Exponential moving average of the weights, sharded as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from wanma.checkpoint.format.local_shards import local_tensor
from wanma.torch_internals.operators import foreach_lerp_


class WeightAverage:
    """Average ← decay × average + (1 − decay) × weights, after every update (Polyak and Juditsky 1992).

    Args:
        weights: trained weights by name. The average of a weight that is frozen for good is the weight
            itself.
        decay: share of the average that each update keeps, 0 .. 1.
    """

    def __init__(self, weights: dict[str, nn.Parameter], decay: float) -> None:
        self._decay = decay
        self._weights = weights
        self.tensors: dict[str, Tensor] = {
            name: parameter.detach().clone() for name, parameter in self._weights.items()
        }

    @torch.no_grad()
    def update(self) -> None:
        averages = [local_tensor(tensor) for tensor in self.tensors.values()]
        weights = [local_tensor(parameter) for parameter in self._weights.values()]
        if averages:
            foreach_lerp_(averages, weights, 1 - self._decay)

    @torch.no_grad()
    def reset(self) -> None:
        """Reset the average to the weights as they are now."""
        for name, parameter in self._weights.items():
            local_tensor(self.tensors[name]).copy_(local_tensor(parameter))

    @contextmanager
    def use_average(self) -> Iterator[None]:
        """Make the model compute with the average, within the context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        with torch.no_grad():
            for name, parameter in self._weights.items():
                average, weight = local_tensor(self.tensors[name]), local_tensor(parameter)
                weight_copy = weight.clone()
                weight.copy_(average)
                average.copy_(weight_copy)
