"""Validation split of documents: without leaks, and independent of the seed.

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

from wanma.data.text.token_file import TokenFile
from wanma.job.errors import JobError

Segments = NDArray[np.int64]
"""Segments of a token file, (segments, 2): first token and end of each."""


@dataclass(frozen=True)
class ValidationSplit:
    """Training and validation side of one source."""

    train: Segments
    validation: Segments
    validation_tail_fraction: float = 0.0
    """Share of every document, at its end, used for validation, where there are too few whole documents."""


def split_documents(
    files: Sequence[TokenFile], fraction: float, sequence_length: int
) -> list[ValidationSplit]:
    """Split every source's documents; all sources together get at least one validation sequence.

    Args:
        fraction: share of documents to keep for validation; 0: none.
        sequence_length: tokens of a sequence; a side needs at least one token more.

    Raises:
        JobError: too little text for one sequence of training in some source, or of validation in all.
    """
    min_tokens = sequence_length + 1
    for file in files:
        if len(file.tokens) < min_tokens:
            raise _insufficient_text(len(file.tokens), sequence_length)
    threshold = np.uint64(min(int(fraction * 2.0**64), 2**64 - 1))
    hash_masks = [file.digests < threshold for file in files]
    masks = _rebalance_split(files, hash_masks, fraction, min_tokens) if fraction else hash_masks
    if masks is None:
        return _split_within_documents(files, fraction, sequence_length)
    return [_split_by_document(file, mask) for file, mask in zip(files, masks, strict=True)]


def _rebalance_split(
    files: Sequence[TokenFile], masks: list[NDArray[np.bool_]], fraction: float, min_tokens: int
) -> list[NDArray[np.bool_]] | None:
    """Move as few documents as both sides require, all copies of one together; None: no choice is enough.

    Every source keeps at least half of its training share, so that one huge document on the wrong
    side cannot take the training text away.

    Args:
        masks: per source, mask of the documents whose hash puts them into validation.
    """
    sizes = np.array([len(file.tokens) for file in files])
    min_train_tokens = np.maximum(min_tokens, sizes * (1 - fraction) / 2)
    validation_tokens = np.array([file.lengths[mask].sum() for file, mask in zip(files, masks, strict=True)])
    train_tokens = sizes - validation_tokens
    if (train_tokens >= min_train_tokens).all() and (validation_tokens >= min_tokens).any():
        return masks  # usual for a large corpus, which skips the work below

    contents, first_indices, content_indices = np.unique(
        np.concatenate([file.digests for file in files]), return_index=True, return_inverse=True
    )
    is_validation = np.concatenate(masks)[first_indices]
    ends = np.cumsum([len(file.digests) for file in files])
    tokens = np.zeros(
        (len(files), len(contents)), np.int64
    )  # of each content in each source, with its copies
    for row, file, end in zip(tokens, files, ends, strict=True):
        np.add.at(row, content_indices[end - len(file.digests) : end], file.lengths)
    smallest_first = np.argsort(tokens.sum(axis=0), kind="stable")
    for index in smallest_first[::-1]:
        if (train_tokens >= min_train_tokens).all():
            break
        if is_validation[index] and (tokens[train_tokens < min_train_tokens, index] > 0).any():
            is_validation[index] = False
            train_tokens += tokens[:, index]
            validation_tokens -= tokens[:, index]
    for index in smallest_first:
        if (validation_tokens >= min_tokens).any():
            break
        if not is_validation[index] and (train_tokens - tokens[:, index] >= min_train_tokens).all():
            is_validation[index] = True
            train_tokens -= tokens[:, index]
            validation_tokens += tokens[:, index]
    if (train_tokens < min_train_tokens).any() or (validation_tokens < min_tokens).all():
        return None
    return np.split(is_validation[content_indices], ends[:-1])


def _split_within_documents(
    files: Sequence[TokenFile], fraction: float, sequence_length: int
) -> list[ValidationSplit]:
    """Split inside documents: the end of every document is for validation."""
    min_tokens = sequence_length + 1
    share = max(fraction, min_tokens / max(len(file.tokens) for file in files))
    splits = []
    for file in files:
        starts, ends = file.offsets[:-1], file.offsets[1:]
        cuts = ends - np.ceil(file.lengths * share).astype(np.int64)
        splits.append(ValidationSplit(_merge_segments(starts, cuts), _merge_segments(cuts, ends), share))
        if (tokens := _count_tokens(splits[-1].train)) < min_tokens:
            raise _insufficient_text(tokens, sequence_length, f" without the {share:.0%} for validation")
    return splits


def _split_by_document(file: TokenFile, validation: NDArray[np.bool_]) -> ValidationSplit:
    starts, ends = file.offsets[:-1], file.offsets[1:]
    return ValidationSplit(
        _merge_segments(starts[~validation], ends[~validation]),
        _merge_segments(starts[validation], ends[validation]),
    )


def _merge_segments(starts: NDArray[Any], ends: NDArray[Any]) -> Segments:
    """Merge neighbouring segments and drop empty ones: with few of them, most rows are one copy."""
    is_nonempty = ends > starts
    starts, ends = starts[is_nonempty], ends[is_nonempty]
    if not len(starts):
        return np.empty((0, 2), np.int64)
    gaps = np.flatnonzero(starts[1:] != ends[:-1])
    first = np.concatenate([starts[:1], starts[1:][gaps]])
    last = np.concatenate([ends[:-1][gaps], ends[-1:]])
    return np.stack([first, last], axis=1).astype(np.int64)


def _count_tokens(segments: Segments) -> int:
    return int((segments[:, 1] - segments[:, 0]).sum())


def _insufficient_text(tokens: int, sequence_length: int, clause: str = "") -> JobError:
    return JobError(
        f"data.sequence_length: {sequence_length} is too long for a text of {tokens:,} tokens{clause}; "
        f"one sequence needs {sequence_length + 1:,}",
        "add text, lower data.sequence_length, or train without validation (data.validation_fraction=0)",
    )
