"""Inputs and targets of tokens as tensors, and a shuffle in a buffer."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from contents import Batch
from torch import Tensor


def split(rows: Tensor) -> Batch:
    """Return inputs and targets (rows, sequence) of tokens (rows, sequence + 1)."""
    wide = rows.to(torch.int64)
    return wide[:, :-1].contiguous(), wide[:, 1:].contiguous()


def token_batches(loader: Iterable[Any], field: str = "") -> Iterator[Batch]:
    """Yield the batches of a loader of tokens, epoch after epoch; of samples with fields those of `field`."""
    while True:
        for sample in loader:
            yield split(sample[field] if field else sample)


def shuffled(rows: Iterable[Tensor], buffer_rows: int = 1000) -> Iterator[Tensor]:
    """Yield all rows, each drawn from a buffer of as many."""
    buffer: list[Tensor] = []
    for row in rows:
        buffer.append(row)
        if len(buffer) > buffer_rows:
            yield buffer.pop(random.randrange(len(buffer)))
    random.shuffle(buffer)
    yield from buffer
