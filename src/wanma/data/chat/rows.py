"""Rows of whole conversations, of which no row holds a part. No torch here."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wanma.data.chat.encoding import NO_TARGET
from wanma.data.sampling.permutation import IndexArray
from wanma.job.sections.data import ChatSection


class ConversationRows:
    """Side of the split of a token file of conversations, as `sequence_count` rows; see `PackedSequences`.

    A row holds one conversation, or consecutive ones while they fit. It is filled up by ends of documents
    that are no targets.

    Args:
        tokens: tokens of the token file, with their marks.
        starts: first token of each conversation of this side, rising.
        filling: token after the end of a row.
        sequence_length: inputs of a row; it holds one token more.
    """

    def __init__(
        self,
        tokens: NDArray[np.uint32],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        filling: int,
        sequence_length: int,
        chat: ChatSection,
    ) -> None:
        capacity = sequence_length + 1
        is_long = lengths > capacity
        self.too_long = int(is_long.sum())
        if chat.too_long == "skip":
            starts, lengths = starts[~is_long], lengths[~is_long]
        lengths = np.minimum(lengths, capacity)
        self._tokens, self._capacity = tokens, capacity
        self._conversation_starts = starts
        self._filling = NO_TARGET | filling
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

    def find(self, sequence_indices: IndexArray) -> IndexArray:
        """Return the places of rows, as `read` takes them: their indices."""
        return sequence_indices

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
