"""Contents of the data: what the samples of one pass must be, however they are ordered."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Batch = tuple[Tensor, Tensor]
"""Inputs and targets of some samples."""


class Content(Protocol):
    """Samples of one pass of a reader."""

    samples: int
    stored_bytes: float
    """Size of the data from which all readers made their own form."""

    def check(self, batches: Iterable[Batch]) -> None:
        """Raise `AssertionError` if the samples are not those of the data, each once."""


@dataclass(frozen=True)
class TokenWindows:
    """Sequences of tokens, each once in a pass.

    Args:
        windows: returns the tokens (sequence + 1,) of all sequences.
    """

    windows: Callable[[], Iterable[NDArray[Any]]]
    samples: int
    stored_bytes: float

    def check(self, batches: Iterable[Batch]) -> None:
        expected = sorted(_digest(window) for window in self.windows())
        assert len(expected) == self.samples, (len(expected), self.samples)
        found = sorted(_digest(window) for window in _windows_of(batches))
        differing = sum(one != other for one, other in zip(found, expected, strict=True))
        assert found == expected, f"{differing} of {len(expected)} sequences are not those of the data"


@dataclass(frozen=True)
class TokenCounts:
    """Sequences of tokens whose borders are the reader's own: all tokens, but for remainders, once in a pass.

    Args:
        counts: returns how often each token occurs.
        samples: whole sequences that a pass has at least.
        lost_share: share of the tokens that may lie in remainders.
    """

    counts: Callable[[], NDArray[np.int64]]
    samples: int
    stored_bytes: float
    lost_share: float

    def check(self, batches: Iterable[Batch]) -> None:
        expected = self.counts()
        found = np.zeros_like(expected)
        for window in _windows_of(batches):
            found += np.bincount(window, minlength=len(expected))
        excess = int((found - expected).clip(min=0).sum())
        lost = int((expected - found).clip(min=0).sum())
        limit = self.lost_share * int(expected.sum())
        assert excess <= limit, f"{excess} tokens that the data do not have, or have less often"
        assert lost <= limit, f"{lost} of {int(expected.sum())} tokens are missing"


@dataclass(frozen=True)
class LabelledImages:
    """Images changed at random, of which the labels and the range of the pixels can be checked."""

    labels: Callable[[], Sequence[int]]
    samples: int
    stored_bytes: float

    def check(self, batches: Iterable[Batch]) -> None:
        found: list[int] = []
        for inputs, targets in batches:
            assert inputs.dtype == torch.float32, inputs.dtype
            assert inputs.ndim == 4, inputs.shape
            flat = inputs.flatten(1)
            assert bool((flat.std(1) > 0.01).all()), "an image of one color"
            assert bool((flat.abs() < 3).all()), "pixels that are not normalized"
            found += targets.tolist()
        assert sorted(found) == sorted(self.labels()), "labels are not those of the data"


def packed(documents: Iterable[NDArray[Any]], end: int, length: int) -> Iterator[NDArray[np.int64]]:
    """Yield the windows of `length` + 1 tokens that begin every `length` tokens of the joined documents.

    Args:
        documents: tokens of each document, without its end.
        end: token that ends a document.
        length: tokens of a sample.
    """
    joined = [part for document in documents for part in (document.astype(np.int64), np.array([end]))]
    tokens = np.concatenate(joined)
    for start in range(0, len(tokens) - length, length):
        yield tokens[start : start + length + 1]


def _windows_of(batches: Iterable[Batch]) -> Iterator[NDArray[np.int64]]:
    for inputs, targets in batches:
        assert inputs.dtype == targets.dtype == torch.int64, (inputs.dtype, targets.dtype)
        assert torch.equal(inputs[:, 1:], targets[:, :-1]), "targets are not the next tokens"
        yield from torch.cat((inputs, targets[:, -1:]), 1).numpy()


def _digest(window: NDArray[Any]) -> int:
    return zlib.crc32(window.astype(np.int64).tobytes())
