"""Sequence packing: fixed-length rows from concatenated documents, without waste. No torch here.

Sequence i of a stream is its tokens [i * L, i * L + L + 1): L inputs and, shifted by one, L targets. Many
rows are read from the memory map by one numpy call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from wanma.data.sampling.permutation import Numbers
from wanma.data.text.validation_split import Segments


class TokenStream:
    """Side of the split of one token file, as `sequences` rows of `sequence_length + 1` tokens."""

    def __init__(self, tokens: NDArray[Any], segments: Segments, sequence_length: int) -> None:
        lengths = segments[:, 1] - segments[:, 0]
        self._length = sequence_length
        self._tokens = tokens
        self._starts = np.concatenate([[0], np.cumsum(lengths)])  # of each segment, in the stream
        self._shift = segments[:, 0] - self._starts[:-1]  # from a position in the stream to one in the file
        self.size = int(lengths.sum())
        self.sequences = max((self.size - 1) // sequence_length, 0)

    def read(self, sequences: Numbers) -> NDArray[np.int64]:
        """Return the tokens (rows, sequence_length + 1) of the sequences with these indices."""
        starts = sequences * self._length
        first, last = self._segment(starts), self._segment(starts + self._length)
        whole = first == last
        if whole.all():
            found: NDArray[Any] = self._windows[starts + self._shift[first]]
            return found.astype(np.int64)
        rows = np.empty((len(sequences), self._length + 1), np.int64)
        rows[whole] = self._windows[starts[whole] + self._shift[first[whole]]]
        positions = self._positions(sequences[~whole])
        rows[~whole] = self._tokens[positions + self._shift[self._segment(positions)]]
        return rows

    def seams(self, sequences: Numbers) -> NDArray[np.bool_]:
        """Return a mask (rows, sequence_length + 1), true at each segment's first token, after other text."""
        return np.isin(self._positions(sequences), self._starts)

    @property
    def _windows(self) -> NDArray[Any]:
        return sliding_window_view(self._tokens, self._length + 1)

    def _segment(self, positions: Numbers) -> NDArray[np.intp]:
        return np.searchsorted(self._starts, positions, side="right") - 1

    def _positions(self, sequences: Numbers) -> Numbers:
        positions: Numbers = sequences[:, None] * self._length + np.arange(self._length + 1)
        return positions


def document_masks(
    rows: NDArray[np.int64], seams: NDArray[np.bool_], end_of_document: int
) -> tuple[Numbers, Numbers, NDArray[np.bool_]]:
    """Compute the masks that separate the documents of a row.

    Args:
        rows: tokens (rows, sequence + 1).
        seams: (rows, sequence + 1), true where another text begins although no document ended.
        end_of_document: its token.

    Returns:
        documents: (rows, sequence), 0 for the first document in the row, then counting up.
        positions: (rows, sequence), from 0 at the first token in the row of each document.
        foreign: (rows, sequence), true where the target is the first token of the next document.
    """
    begins = seams.copy()
    begins[:, 1:] |= rows[:, :-1] == end_of_document
    begins[:, 0] = True
    foreign = begins[:, 1:]
    begins = begins[:, :-1]
    steps = np.arange(begins.shape[1])
    positions = steps - np.maximum.accumulate(np.where(begins, steps, 0), axis=1)
    return np.cumsum(begins, axis=1) - 1, positions, foreign
