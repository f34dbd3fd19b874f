"""Base of the recommenders: parallel spec, initial values, and perceptrons."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from wanma.models.recommender.config import RecommenderConfig
from wanma.models.structure.parallel_spec import ParallelSpec

RECOMMENDER_PARALLEL_SPEC = ParallelSpec(blocks=None)
"""Parallel spec of recommenders: data parallelism, with any ZeRO stage."""


class Recommender(nn.Module):
    """Base class of recommenders."""

    embedding_deviation = 0.05
    """Standard deviation of an embedding's initial values."""

    def __init__(self, config: RecommenderConfig) -> None:
        super().__init__()
        self.config = config

    def initialize_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill a tile of parameter `name` in place; linear layers as Glorot and Bengio 2010 do."""
        if name == "bias":
            tensor.fill_(self.config.initial_score)
        elif name.startswith("biases.") or name.endswith("bias"):
            tensor.zero_()
        elif ".of_" in name:
            tensor.normal_(0.0, self.embedding_deviation, generator=generator)
        else:
            tensor.normal_(0.0, math.sqrt(2.0 / sum(self.get_parameter(name).shape)), generator=generator)


def perceptron(widths: Sequence[int], *, ends_with_relu: bool) -> nn.Sequential:
    """Build linear layers of widths `widths`, the first of which is the input's, with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*(layers if ends_with_relu else layers[:-1]))
