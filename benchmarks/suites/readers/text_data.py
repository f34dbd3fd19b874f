"""JSON lines with text, a tokenizer for it, and Parquet files with the same text as token ids."""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from contents import TokenCounts, TokenWindows, packed
from made_data import made
from numpy.typing import NDArray

SEQUENCE = 1024
VOCABULARY = 4096
END_OF_DOCUMENT = "<|endoftext|>"
ROW_GROUP_ROWS = 256
"""Rows of a row group of Parquet; a row is a sequence and one token."""
_TOKENIZER_BYTES = 1_000_000
"""Text from which the tokenizer learns."""


@dataclass(frozen=True)
class TextData:
    """Source code of Python's own library, cut into documents.

    Args:
        folder: folder of all data.
        files: number of files.
        text_bytes: bytes of text in all.
        document_characters: characters of a document.
    """

    folder: Path
    files: int
    text_bytes: int
    document_characters: int = 4000

    @classmethod
    def of(cls, options: argparse.Namespace) -> TextData:
        return cls(options.folder, 4, 1_000_000) if options.small else cls(options.folder, 8, 16_000_000)

    @cached_property
    def json_files(self) -> list[Path]:
        """Files of JSON lines: objects with `text` and `number`."""
        return sorted(made(self.folder, "json", self._write_json).glob("*.jsonl"))

    @cached_property
    def tokenizer_file(self) -> Path:
        return made(self.folder, "tokenizer", self._write_tokenizer) / "tokenizer.json"

    @cached_property
    def parquet_files(self) -> list[Path]:
        """Files of Parquet: rows of `SEQUENCE` + 1 ids in the column `tokens`."""
        return sorted(made(self.folder, "parquet", self._write_parquet).glob("*.parquet"))

    @property
    def json_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.json_files)

    @property
    def parquet_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.parquet_files)

    def texts(self) -> Iterator[str]:
        for path in self.json_files:
            with path.open(encoding="utf-8") as lines:
                for line in lines:
                    yield json.loads(line)["text"]

    def tokens(self) -> NDArray[np.uint16]:
        """Return the tokens of all documents with their ends, encoded once."""
        return np.load(made(self.folder, "json-tokens", self._write_tokens) / "tokens.npy")

    def content_of_packed_json(self) -> TokenWindows:
        """Return the samples of a reader that joins all documents and cuts them in one place."""
        tokens = self.tokens().astype(np.int64)
        samples = (len(tokens) - 1) // SEQUENCE

        def windows() -> Iterator[NDArray[np.int64]]:
            for start in range(0, samples * SEQUENCE, SEQUENCE):
                yield tokens[start : start + SEQUENCE + 1]

        return TokenWindows(windows, samples, self.json_bytes)

    def content_of_json_blocks(self, parts: int) -> TokenCounts:
        """Return the samples of a reader that packs each of `parts` parts of the documents by itself."""
        tokens = self.tokens()
        samples = len(tokens) // (SEQUENCE + 1) - parts
        return TokenCounts(
            lambda: np.bincount(tokens, minlength=VOCABULARY),
            samples,
            self.json_bytes,
            (2 * parts + 1) * (SEQUENCE + 1) / len(tokens),
        )

    def parquet_rows(self) -> NDArray[np.uint16]:
        tokens = self.tokens()
        return tokens[: len(tokens) // (SEQUENCE + 1) // 32 * 32 * (SEQUENCE + 1)].reshape(-1, SEQUENCE + 1)

    def content_of_parquet_rows(self) -> TokenWindows:
        """Return the samples of readers of rows."""
        rows = self.parquet_rows()
        return TokenWindows(lambda: iter(rows), len(rows), self.parquet_bytes)

    def content_of_packed_parquet(self) -> TokenWindows:
        """Return the samples of a reader that takes a row for a document, and packs them."""
        end = self.end_of_document
        rows = [row[:-1] if row[-1] == end else row for row in self.parquet_rows()]
        tokens = sum(len(row) + 1 for row in rows)
        samples = (tokens - 1) // SEQUENCE
        return TokenWindows(lambda: packed(rows, end, SEQUENCE), samples, self.parquet_bytes)

    @property
    def end_of_document(self) -> int:
        end = load_tokenizer(self.tokenizer_file).token_to_id(END_OF_DOCUMENT)
        assert end is not None
        return end

    def _write_json(self, folder: Path) -> None:
        files = [(folder / f"{number:03}.jsonl").open("w", encoding="utf-8") for number in range(self.files)]
        size = number = 0
        for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
            if "site-packages" in path.parts:
                continue
            source = path.read_text(encoding="utf-8", errors="replace")
            for start in range(0, len(source), self.document_characters):
                text = source[start : start + self.document_characters]
                print(json.dumps({"number": number, "text": text}), file=files[number % self.files])
                number, size = number + 1, size + len(text)
                if size >= self.text_bytes:
                    break
            if size >= self.text_bytes:
                break
        for file in files:
            file.close()

    def _write_tokenizer(self, folder: Path) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[END_OF_DOCUMENT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(_first_bytes(self.texts(), _TOKENIZER_BYTES), trainer)
        tokenizer.save(str(folder / "tokenizer.json"))

    def _write_tokens(self, folder: Path) -> None:
        tokenizer, end = load_tokenizer(self.tokenizer_file), self.end_of_document
        found = [np.array([*tokenizer.encode(text).ids, end], np.uint16) for text in self.texts()]
        np.save(folder / "tokens.npy", np.concatenate(found))

    def _write_parquet(self, folder: Path) -> None:
        import pyarrow
        from pyarrow import parquet

        rows = self.parquet_rows()
        for number, part in enumerate(np.array_split(rows, self.files)):
            values = pyarrow.array(part.reshape(-1), pyarrow.uint16())
            offsets = pyarrow.array(np.arange(len(part) + 1, dtype=np.int32) * (SEQUENCE + 1))
            column = pyarrow.ListArray.from_arrays(offsets, values)
            parquet.write_table(
                pyarrow.table({"tokens": column}),
                folder / f"{number:03}.parquet",
                row_group_size=ROW_GROUP_ROWS,
            )


def load_tokenizer(path: Path) -> Any:
    """Return the tokenizer of a file."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def _first_bytes(texts: Iterable[str], size: int) -> Iterator[str]:
    """Yield texts until they have so many characters."""
    for text in texts:
        if size <= 0:
            return
        size -= len(text)
        yield text


class Packer:
    """Blocks of tokens from documents, as readers without a packing of their own make them.

    Args:
        length: tokens of a block.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._tokens: list[int] = []

    def add(self, documents: Iterable[list[int]], end: int) -> Iterator[NDArray[np.int64]]:
        """Add documents, and yield the blocks that are full; the rest waits for more."""
        for document in documents:
            self._tokens += [*document, end]
            while len(self._tokens) >= self._length:
                yield np.array(self._tokens[: self._length])
                del self._tokens[: self._length]
