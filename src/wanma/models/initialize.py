"""Initial values that do not depend on the layout: each parameter draws from a generator of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from wanma.job.errors import WanmaError


class InitializesParameters(Protocol):
    """A model that knows how each of its parameters begins."""

    def initialize_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill `tensor`, the full value of parameter `name`, in place, drawing only from `generator`."""


def initial_value(model: nn.Module, name: str, shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """The full initial value of one parameter, on CPU.

    A function of (seed, name, shape) alone: which rank asks, in which order and for how many
    parameters changes nothing. Drawn in fp32 whatever `dtype` is, so that runs in different
    precision start from the same point.

    Raises:
        WanmaError: the model has no rule of its own (`initialize_parameter`).
    """
    if not hasattr(model, "initialize_parameter"):
        raise WanmaError(
            f"{type(model).__name__} does not say how parameter {name} begins",
            "give it initialize_parameter(name, tensor, generator), or let its constructor initialise it",
        )
    generator = torch.Generator(device="cpu").manual_seed(stable_hash(f"{seed}:{name}"))
    tensor = torch.empty(tuple(shape), dtype=torch.float32, device="cpu")
    with torch.no_grad():
        cast(InitializesParameters, model).initialize_parameter(name, tensor, generator)
    return tensor.to(dtype)


def stable_hash(text: str) -> int:
    """63 bits that are the same in every process, on every machine and in every version."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
