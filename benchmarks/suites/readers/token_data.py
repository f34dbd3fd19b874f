"""Text of random bytes and its tokens, which each reader stores in the form that its documentation names."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from contents import TokenWindows, packed
from made_data import made
from numpy.typing import NDArray

SEQUENCE = 2048
END_OF_DOCUMENT = 256
"""Token that wanma's tokenizer of bytes puts after a document."""


@dataclass(frozen=True)
class TokenData:
    """Rows of `SEQUENCE` + 1 tokens, and text files whose bytes are as many tokens.

    Args:
        folder: folder of all data.
        files: number of text files, and of shards.
        rows_per_file: rows of each.
    """

    folder: Path
    files: int
    rows_per_file: int

    @classmethod
    def of(cls, options: argparse.Namespace) -> TokenData:
        return cls(options.folder, 4, 256) if options.small else cls(options.folder, 64, 1024)

    @property
    def row_count(self) -> int:
        return self.files * self.rows_per_file

    @property
    def stored_bytes(self) -> int:
        """Size of the rows, of two bytes a token."""
        return self.row_count * (SEQUENCE + 1) * 2

    def rows(self) -> NDArray[np.uint16]:
        """Return the tokens (rows, `SEQUENCE` + 1), mapped into memory."""
        path = made(self.folder, "rows", self._write_rows)
        return np.load(path / "rows.npy", mmap_mode="r")

    def text(self) -> Path:
        """Return a folder of text files."""
        return made(self.folder, "text", self._write_text)

    def content_of_rows(self) -> TokenWindows:
        """Return the samples of readers of rows."""
        return TokenWindows(partial(iter, self.rows()), self.row_count, self.stored_bytes)

    def content_of_text(self) -> TokenWindows:
        """Return the samples of readers that pack the text."""
        tokens = self.row_count * SEQUENCE + self.files
        return TokenWindows(self._packed_text, (tokens - 1) // SEQUENCE, self.stored_bytes)

    def _packed_text(self) -> Iterator[NDArray[np.int64]]:
        documents = (np.fromfile(path, np.uint8) for path in sorted(self.text().glob("*.txt")))
        return packed(documents, END_OF_DOCUMENT, SEQUENCE)

    def _write_rows(self, folder: Path) -> None:
        rows = [
            _draw(number, self.rows_per_file * (SEQUENCE + 1)).reshape(self.rows_per_file, -1)
            for number in range(self.files)
        ]
        np.save(folder / "rows.npy", np.concatenate(rows).astype(np.uint16))

    def _write_text(self, folder: Path) -> None:
        for number in range(self.files):
            content = _draw(number, self.rows_per_file * SEQUENCE)
            content[::80] = ord("\n")
            (folder / f"{number:03}.txt").write_bytes(content.tobytes())


def _draw(number: int, size: int) -> NDArray[np.uint8]:
    generator = np.random.default_rng(number)
    return generator.integers(32, 127, size, dtype=np.uint8)
