"""Sequence packing: fixed-length rows from concatenated documents, without waste. No torch here.

Sequence i of a stream is its tokens [i * L, i * L + L + 1): L inputs and, shifted by one, L targets. Many
rows are read from the memory map by one numpy call.

A document's side of the validation split follows from a hash of its content alone, so identical documents, in
one source or in several, are on the same side, whatever the seed. Small corpora move the smallest documents
that a sequence on either side needs. The smallest corpora are split inside their documents, each at the same
share of its length, which keeps copies together too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from wanma.data.chat.rows import ConversationRows
from wanma.data.sampling.permutation import IndexArray
from wanma.data.text.token_file import TokenFile
from wanma.job.errors import JobError
from wanma.job.sections.data import DataSection

Segments = NDArray[np.int64]
"""Segments of a token file, (segments, 2): first token and end of each."""


class PackedSequences:
    """Side of the split of one token file, as `sequence_count` rows of `sequence_length + 1` tokens."""

    def __init__(self, tokens: NDArray[Any], segments: Segments, sequence_length: int) -> None:
        lengths = segments[:, 1] - segments[:, 0]
        self._length = sequence_length
        self._tokens = tokens
        self._windows: NDArray[Any] = (
            sliding_window_view(tokens, sequence_length + 1) if len(tokens) > sequence_length else tokens
        )
        self._starts = np.concatenate([[0], np.cumsum(lengths)])  # of each segment, in the stream
        self._file_offset = (
            segments[:, 0] - self._starts[:-1]
        )  # from a position in the stream to one in the file
        self.token_count = int(lengths.sum())
        self.sequence_count = max((self.token_count - 1) // sequence_length, 0)

    def find(self, sequence_indices: IndexArray) -> IndexArray:
        """Return the places of sequences, as `read` takes them.

        A place is the first token in the file, or -1 - index where the sequence lies in several segments.
        """
        starts = sequence_indices * self._length
        segments = self._segment(starts)
        is_whole = self._starts[segments + 1] > starts + self._length
        return np.where(is_whole, starts + self._file_offset[segments], -1 - sequence_indices)

    def read(self, places: IndexArray) -> NDArray[Any]:
        """Return the tokens (rows, sequence_length + 1) of the sequences at these places, as stored."""
        rows: NDArray[Any]
        if np.minimum.reduce(places) >= 0:
            rows = self._windows[places]
            return rows
        is_whole = places >= 0
        rows = np.empty((len(places), self._length + 1), self._tokens.dtype)
        rows[is_whole] = self._windows[places[is_whole]]
        positions = self._positions(-1 - places[~is_whole])
        rows[~is_whole] = self._tokens[positions + self._file_offset[self._segment(positions)]]
        return rows

    def segment_starts(self, sequence_indices: IndexArray) -> NDArray[np.bool_]:
        """Return a mask (rows, sequence_length + 1), true at each segment's first token, after other text."""
        return np.isin(self._positions(sequence_indices), self._starts)

    def _segment(self, positions: IndexArray) -> NDArray[np.intp]:
        return self._starts.searchsorted(positions, side="right") - 1

    def _positions(self, sequence_indices: IndexArray) -> IndexArray:
        positions: IndexArray = sequence_indices[:, None] * self._length + np.arange(self._length + 1)
        return positions


Stream = PackedSequences | ConversationRows
"""Rows of one side of a source."""


@dataclass(frozen=True)
class CorpusSides:
    """Rows of both sides of the validation split of one source."""

    train: Stream
    validation: Stream
    validation_tail_fraction: float = 0.0

    @property
    def too_long(self) -> int:
        """Number of conversations that are longer than a row."""
        sides = (self.train, self.validation)
        return sum(side.too_long for side in sides if isinstance(side, ConversationRows))


def divide_corpus(files: Sequence[TokenFile], section: DataSection) -> list[CorpusSides]:
    """Divide each source into rows of training and of validation.

    Raises:
        JobError: too little data on a side, or a conversation is too long and the job does not say what
            becomes of it.
    """
    length, fraction = section.sequence_length, section.validation_fraction
    texts = [file for file in files if not file.is_chat]
    splits = iter(split_documents(texts, fraction, length) if texts else [])
    sides = []
    for file in files:
        if file.is_chat:
            sides.append(_divide_conversations(file, section))
            continue
        split = next(splits)
        train, validation = (
            PackedSequences(file.tokens, one, length) for one in (split.train, split.validation)
        )
        sides.append(CorpusSides(train, validation, split.validation_tail_fraction))
    return sides


def _divide_conversations(file: TokenFile, section: DataSection) -> CorpusSides:
    length, chat = section.sequence_length, section.chat
    is_long = file.lengths > length + 1
    if is_long.any() and chat.too_long == "refuse":
        raise JobError(
            f"data.chat.too_long: {is_long.sum():,} of {len(is_long):,} conversations are longer than a row "
            f"of data.sequence_length = {length}; the longest has {file.lengths.max():,} tokens",
            f"set data.sequence_length to {file.lengths.max() - 1}, or data.chat.too_long to 'cut' or 'skip'",
        )
    kept = ~is_long if chat.too_long == "skip" else np.ones_like(is_long)
    is_validation = file.digests < np.uint64(min(int(section.validation_fraction * 2.0**64), 2**64 - 1))
    if kept.any() and section.validation_fraction and not is_validation[kept].any():
        is_validation |= file.digests == file.digests[kept].min()
    elif kept.any() and is_validation[kept].all():
        is_validation &= file.digests < file.digests[kept].max()
    starts, filling = file.offsets[:-1], int(file.header["end_of_document"])
    train, validation = (
        ConversationRows(file.tokens, starts[mask], file.lengths[mask], filling, length, chat)
        for mask in (~is_validation, is_validation)
    )
    if not train.sequence_count or (section.validation_fraction and not validation.sequence_count):
        side = "validation" if train.sequence_count else "training"
        raise JobError(
            f"data.columns.messages: {len(is_long):,} conversations, {is_long.sum():,} of them longer than "
            f"data.sequence_length = {length}, leave no row for {side}",
            "add conversations, raise data.sequence_length, or set data.validation_fraction=0",
        )
    return CorpusSides(train, validation)


def find_document_boundaries(
    rows: NDArray[np.int64], segment_starts: NDArray[np.bool_], end_of_document_id: int
) -> tuple[IndexArray, IndexArray, NDArray[np.bool_]]:
    """Compute the masks that separate the documents of a row.

    Args:
        rows: tokens (rows, sequence + 1).
        segment_starts: (rows, sequence + 1), true where another text begins although no document ended.

    Returns:
        documents: (rows, sequence), 0 for the first document in the row, then counting up.
        positions: (rows, sequence), from 0 at the first token in the row of each document.
        foreign: (rows, sequence), true where the target is the first token of the next document.
    """
    is_start = segment_starts.copy()
    is_start[:, 1:] |= rows[:, :-1] == end_of_document_id
    is_start[:, 0] = True
    is_next_start = is_start[:, 1:]
    is_start = is_start[:, :-1]
    steps = np.arange(is_start.shape[1])
    positions = steps - np.maximum.accumulate(np.where(is_start, steps, 0), axis=1)
    return np.cumsum(is_start, axis=1) - 1, positions, is_next_start


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
        tokens = int(np.diff(splits[-1].train).sum())
        if tokens < min_tokens:
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


def _insufficient_text(tokens: int, sequence_length: int, clause: str = "") -> JobError:
    return JobError(
        f"data.sequence_length: {sequence_length} is too long for a text of {tokens:,} tokens{clause}; "
        f"one sequence needs {sequence_length + 1:,}",
        "add text, lower data.sequence_length, or train without validation (data.validation_fraction=0)",
    )
