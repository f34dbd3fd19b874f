"""Which documents are for validation: a split that never leaks and never changes.

A document's side follows from a hash of its content alone, so identical documents, in one source or in
several, are on the same side, whatever the seed. Small corpora move the smallest documents that a sequence on
either side needs; the smallest corpora are split inside their documents, each at the same share of its
length, which keeps copies together too. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wanma.data.token_file import TokenFile
from wanma.job.errors import JobError

Segments = NDArray[np.int64]
"""(segments, 2): first token and end of each stretch of a token file."""


@dataclass(frozen=True)
class Split:
    """One source's two sides."""

    train: Segments
    validation: Segments
    cut: float = 0.0
    """Share of every document, its end, that is for validation, where whole documents are too few."""


def split_documents(files: Sequence[TokenFile], fraction: float, sequence_length: int) -> list[Split]:
    """Split every source's documents; all sources together get at least one validation sequence.

    Args:
        fraction: share of documents to keep for validation; 0: none.
        sequence_length: a side with fewer tokens than one more than this gives no sequence.

    Raises:
        JobError: too little text for one sequence of training in some source, or of validation in all.
    """
    least = sequence_length + 1
    for file in files:
        if len(file.tokens) < least:
            raise _too_little(len(file.tokens), sequence_length)
    if fraction == 0:
        return [_by_document(file, np.zeros(len(file.digests), bool)) for file in files]
    hashes, where = np.unique(np.concatenate([file.digests for file in files]), return_inverse=True)
    tokens = np.zeros((len(files), len(hashes)), np.int64)
    start = 0
    for row, file in zip(tokens, files, strict=True):
        np.add.at(row, where[start : start + len(file.digests)], file.lengths)
        start += len(file.digests)
    chosen = _choose(hashes, tokens, fraction, least)
    if chosen is None:
        return _inside_documents(files, fraction, sequence_length)
    return [_by_document(file, np.isin(file.digests, hashes[chosen])) for file in files]


def _choose(
    hashes: NDArray[np.uint64], tokens: NDArray[np.int64], fraction: float, least: int
) -> NDArray[np.bool_] | None:
    """Which contents are for validation; None when no choice gives both sides enough.

    Every source keeps at least half of what the fraction leaves to it, so that one huge document on the wrong
    side cannot take the training text away.

    Args:
        tokens: (sources, contents): tokens of each content in each source, copies included.
    """
    chosen = hashes < np.uint64(min(int(fraction * 2.0**64), 2**64 - 1))
    needed = np.maximum(least, tokens.sum(axis=1) * (1 - fraction) / 2)
    smallest_first = np.argsort(tokens.sum(axis=0), kind="stable")
    left = (tokens * ~chosen).sum(axis=1)
    for index in smallest_first[::-1]:
        if (left >= needed).all():
            break
        if chosen[index] and (tokens[left < needed, index] > 0).any():
            chosen[index] = False
            left += tokens[:, index]
    kept = (tokens * chosen).sum(axis=1)
    for index in smallest_first:
        if (kept >= least).any():
            break
        if not chosen[index] and (left - tokens[:, index] >= needed).all():
            chosen[index] = True
            left -= tokens[:, index]
            kept += tokens[:, index]
    return chosen if (kept >= least).any() and (left >= needed).all() else None


def _inside_documents(files: Sequence[TokenFile], fraction: float, sequence_length: int) -> list[Split]:
    """The end of every document is for validation."""
    least = sequence_length + 1
    share = max(fraction, least / max(len(file.tokens) for file in files))
    splits = []
    for file in files:
        starts, ends = file.offsets[:-1], file.offsets[1:]
        cuts = ends - np.ceil(file.lengths * share).astype(np.int64)
        splits.append(Split(_segments(starts, cuts), _segments(cuts, ends), share))
        if (tokens := _count(splits[-1].train)) < least:
            raise _too_little(tokens, sequence_length, f" once {share:.0%} is kept for validation")
    return splits


def _by_document(file: TokenFile, validation: NDArray[np.bool_]) -> Split:
    starts, ends = file.offsets[:-1], file.offsets[1:]
    return Split(
        _segments(starts[~validation], ends[~validation]), _segments(starts[validation], ends[validation])
    )


def _segments(starts: NDArray[Any], ends: NDArray[Any]) -> Segments:
    """Neighbours merged, empty ones left out: a large corpus has few, so that most rows are one copy."""
    filled = ends > starts
    starts, ends = starts[filled], ends[filled]
    if not len(starts):
        return np.empty((0, 2), np.int64)
    breaks = np.flatnonzero(starts[1:] != ends[:-1])
    first = np.concatenate([starts[:1], starts[1:][breaks]])
    last = np.concatenate([ends[:-1][breaks], ends[-1:]])
    return np.stack([first, last], axis=1).astype(np.int64)


def _count(segments: Segments) -> int:
    return int((segments[:, 1] - segments[:, 0]).sum())


def _too_little(tokens: int, sequence_length: int, when: str = "") -> JobError:
    return JobError(
        f"data.sequence_length: {sequence_length} is too long for a text of {tokens:,} tokens{when}; "
        f"one sequence needs {sequence_length + 1:,}",
        "add text, lower data.sequence_length, or train without validation (data.validation_fraction=0)",
    )
