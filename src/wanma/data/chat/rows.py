"""Rows of a corpus: packed text, and whole conversations of which no row holds a part. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wanma.data.chat.encoding import NO_TARGET
from wanma.data.sampling.permutation import IndexArray
from wanma.data.text.sequence_packing import PackedSequences
from wanma.data.text.token_file import TokenFile
from wanma.data.text.validation_split import split_documents
from wanma.job.errors import JobError
from wanma.job.sections.data import ChatSection, DataSection


class ConversationRows:
    """Side of the split of a token file of conversations, as `sequence_count` rows; see `PackedSequences`.

    A row holds one conversation, or consecutive ones while they fit. It is filled up by ends of documents
    that are no targets.

    Args:
        file: the token file.
        conversations: mask of those of this side.
        sequence_length: inputs of a row; it holds one token more.
        chat: rules of the rows.
    """

    def __init__(
        self, file: TokenFile, conversations: NDArray[np.bool_], sequence_length: int, chat: ChatSection
    ) -> None:
        capacity = sequence_length + 1
        starts, lengths = file.offsets[:-1][conversations], file.lengths[conversations]
        is_long = lengths > capacity
        self.too_long = int(is_long.sum())
        if chat.too_long == "skip":
            starts, lengths = starts[~is_long], lengths[~is_long]
        lengths = np.minimum(lengths, capacity)
        self._tokens, self._capacity = file.tokens, capacity
        self._conversation_starts = np.sort(starts)
        self._filling = NO_TARGET | int(file.header["end_of_document"])
        rows: list[list[int]] = []
        end = -1
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            if chat.packing and start == end and rows[-1][1] + length <= capacity:
                rows[-1][1] += length
            else:
                rows.append([start, length])
            end = start + length
        self._rows = np.array(rows, np.int64).reshape(-1, 2)
        self.sequence_count = len(rows)
        self.token_count = int(lengths.sum())

    def read(self, sequence_indices: IndexArray) -> NDArray[np.uint32]:
        """Return the tokens (rows, sequence_length + 1) of rows, each with its mark."""
        positions, is_filling = self._positions(sequence_indices)
        rows = self._tokens[np.minimum(positions, len(self._tokens) - 1)]
        rows[is_filling] = self._filling
        return rows

    def segment_starts(self, sequence_indices: IndexArray) -> NDArray[np.bool_]:
        """Return a mask (rows, sequence_length + 1), true at the first token of conversations and filling."""
        positions, is_filling = self._positions(sequence_indices)
        places = np.searchsorted(self._conversation_starts, positions)
        found = self._conversation_starts[np.minimum(places, len(self._conversation_starts) - 1)]
        starts: NDArray[np.bool_] = (found == positions) & ~is_filling
        starts[:, 1:] |= is_filling[:, 1:] & ~is_filling[:, :-1]
        return starts

    def _positions(self, sequence_indices: IndexArray) -> tuple[IndexArray, NDArray[np.bool_]]:
        """Return the positions of rows in the token file, and a mask of those after the end of a row."""
        starts, lengths = self._rows[sequence_indices].T
        steps = np.arange(self._capacity)
        return starts[:, None] + steps, steps >= lengths[:, None]


Stream = PackedSequences | ConversationRows
"""Rows of one side of a source."""


@dataclass(frozen=True)
class CorpusSides:
    """Rows of both sides of the validation split of one source."""

    train: Stream
    validation: Stream
    validation_tail_fraction: float = 0.0
    """See `ValidationSplit.validation_tail_fraction`."""

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
    train = ConversationRows(file, ~is_validation, length, chat)
    validation = ConversationRows(file, is_validation, length, chat)
    if not train.sequence_count or (section.validation_fraction and not validation.sequence_count):
        side = "validation" if train.sequence_count else "training"
        raise JobError(
            f"data.columns.messages: {len(is_long):,} conversations, {is_long.sum():,} of them longer than "
            f"data.sequence_length = {length}, leave no row for {side}",
            "add conversations, raise data.sequence_length, or set data.validation_fraction=0",
        )
    return CorpusSides(train, validation)
