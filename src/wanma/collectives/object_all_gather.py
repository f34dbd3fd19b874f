"""All-gather of Python objects."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

Value = TypeVar("Value")


def all_gather_objects(value: Value, world_size: int) -> list[Value]:
    """Return the value of each rank of the default process group, which one rank alone need not have."""
    gathered = [value] * world_size
    if world_size > 1:
        dist.all_gather_object(gathered, value)
    return gathered
