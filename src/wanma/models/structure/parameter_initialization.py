"""Initial values that do not depend on the layout: each tile of a parameter has a generator of its own."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from wanma.job.errors import WanmaError

_TILE_ELEMENTS = 1 << 18
"""At most so many elements are drawn at once: what a rank draws and does not keep is at most the tiles
that its part cuts."""


class InitializesParameters(Protocol):
    """A model that knows how each of its parameters begins."""

    def initialize_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill `tensor`, a tile of the value of parameter `name`, in place, drawing only from `generator`.

        All tiles of a parameter are alike: a rule that needs the parameter's shape asks the model for it.
        """


def initial_value(model: nn.Module, name: str, shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """The full initial value of one parameter, on CPU; see `initial_part`."""
    return initial_part(model, name, shape, (0,) * len(shape), shape, dtype, seed)


def initial_part(
    model: nn.Module,
    name: str,
    shape: Sequence[int],
    offset: Sequence[int],
    size: Sequence[int],
    dtype: torch.dtype,
    seed: int,
) -> Tensor:
    """A box of the initial value of one parameter, on CPU.

    A function of (seed, name, shape) alone: which rank asks, for which box, in which order and for how
    many parameters changes nothing. Drawn in fp32 whatever `dtype` is, so that runs in different
    precision start from the same point.

    Args:
        shape: of the whole parameter.
        offset: of the box in it, and
        size: of the box.

    Raises:
        WanmaError: the model has no rule of its own (`initialize_parameter`).
    """
    if not hasattr(model, "initialize_parameter"):
        raise WanmaError(
            f"{type(model).__name__} does not say how parameter {name} begins",
            "give it initialize_parameter(name, tensor, generator), or let its constructor initialise it",
        )
    draw = cast(InitializesParameters, model).initialize_parameter
    part = torch.empty(tuple(size), dtype=dtype, device="cpu")
    tile = tile_shape(shape)
    touched = [
        range(start // step, -(-(start + length) // step))
        for start, length, step in zip(offset, size, tile, strict=True)
    ]
    for index in itertools.product(*touched):
        corner = [at * step for at, step in zip(index, tile, strict=True)]
        extent = [min(step, whole - at) for step, whole, at in zip(tile, shape, corner, strict=True)]
        key = ",".join(map(str, index))
        generator = torch.Generator(device="cpu").manual_seed(stable_hash(f"{seed}:{name}:{key}"))
        value = torch.empty(extent, dtype=torch.float32, device="cpu")
        with torch.no_grad():
            draw(name, value, generator)
        inside, outside = [], []
        for at, length, start, count in zip(corner, extent, offset, size, strict=True):
            first, last = max(at, start), min(at + length, start + count)
            inside.append(slice(first - at, last - at))
            outside.append(slice(first - start, last - start))
        part[tuple(outside)] = value[tuple(inside)].to(dtype)
    return part


def tile_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """How a parameter is cut: a matrix into squares, one of more dims along its first two."""
    if not shape:
        return ()
    if len(shape) == 1:
        return (_TILE_ELEMENTS,)
    rest = math.prod(shape[2:])
    across = min(shape[1], max(math.isqrt(_TILE_ELEMENTS), 1), max(_TILE_ELEMENTS // max(rest, 1), 1))
    return (
        max(_TILE_ELEMENTS // max(across * rest, 1), 1),
        max(across, 1),
        *(max(dim, 1) for dim in shape[2:]),
    )


def stable_hash(text: str) -> int:
    """63 bits that are the same in every process, on every machine and in every version."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
