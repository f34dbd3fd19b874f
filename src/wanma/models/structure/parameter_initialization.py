"""Layout-independent initial values: each tile of a parameter has a generator of its own."""

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
"""Maximum number of elements drawn at once.

A rank draws in vain at most the tiles that its part cuts.
"""


class ParameterInitializer(Protocol):
    """Protocol of a model with a rule for the initial value of each of its parameters."""

    def initialize_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill `tensor`, a tile of the value of parameter `name`, in place, drawing only from `generator`.

        All tiles of a parameter are alike: a rule that needs the parameter's shape asks the model for it.
        """


def draw_initial_value(
    model: nn.Module, name: str, shape: Sequence[int], dtype: torch.dtype, seed: int
) -> Tensor:
    """Return the full initial value of one parameter, on CPU; see `draw_initial_shard`."""
    return draw_initial_shard(model, name, shape, (0,) * len(shape), shape, dtype, seed)


def draw_initial_shard(
    model: nn.Module,
    name: str,
    shape: Sequence[int],
    box_offset: Sequence[int],
    box_shape: Sequence[int],
    dtype: torch.dtype,
    seed: int,
) -> Tensor:
    """Return a box of the initial value of one parameter, on CPU.

    A function of (seed, name, shape) alone: it does not depend on the rank, the box, the order or the number
    of parameters. Drawn in fp32 whatever `dtype` is, so that runs in different
    precision start from the same point.

    Args:
        model: the model, with its rule.
        name: of the parameter.
        shape: of the full parameter.
        box_offset: of the box in it.
        box_shape: of the box.
        dtype: of the result.
        seed: the job's.

    Raises:
        WanmaError: the model has no rule of its own (`initialize_parameter`).
    """
    if not hasattr(model, "initialize_parameter"):
        raise WanmaError(
            f"{type(model).__name__} does not initialize parameter {name}",
            "add a method initialize_parameter(name, tensor, generator), or initialize it in the constructor",
        )
    draw = cast(ParameterInitializer, model).initialize_parameter
    part = torch.empty(tuple(box_shape), dtype=dtype, device="cpu")
    tile = tile_shape(shape)
    tile_ranges = [
        range(box_start // tile_size, -(-(box_start + length) // tile_size))
        for box_start, length, tile_size in zip(box_offset, box_shape, tile, strict=True)
    ]
    for index in itertools.product(*tile_ranges):
        tile_start = [start * tile_size for start, tile_size in zip(index, tile, strict=True)]
        tile_extent = [
            min(tile_size, full_size - start)
            for tile_size, full_size, start in zip(tile, shape, tile_start, strict=True)
        ]
        key = ",".join(map(str, index))
        generator = torch.Generator(device="cpu").manual_seed(stable_hash(f"{seed}:{name}:{key}"))
        value = torch.empty(tile_extent, dtype=torch.float32, device="cpu")
        with torch.no_grad():
            draw(name, value, generator)
        tile_slices, part_slices = [], []
        for start, length, box_start, count in zip(
            tile_start, tile_extent, box_offset, box_shape, strict=True
        ):
            first, last = max(start, box_start), min(start + length, box_start + count)
            tile_slices.append(slice(first - start, last - start))
            part_slices.append(slice(first - box_start, last - box_start))
        part[tuple(part_slices)] = value[tuple(tile_slices)].to(dtype)
    return part


def tile_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a parameter's tiles: squares of a matrix; more dims are cut along the first two."""
    if not shape:
        return ()
    if len(shape) == 1:
        return (_TILE_ELEMENTS,)
    inner_elements = math.prod(shape[2:])
    columns = min(
        shape[1], max(math.isqrt(_TILE_ELEMENTS), 1), max(_TILE_ELEMENTS // max(inner_elements, 1), 1)
    )
    return (
        max(_TILE_ELEMENTS // max(columns * inner_elements, 1), 1),
        max(columns, 1),
        *(max(dim, 1) for dim in shape[2:]),
    )


def stable_hash(text: str) -> int:
    """Return a hash of 63 bits that is the same in every process, on every node and in every version."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
