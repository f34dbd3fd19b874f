"""Writers of token files: the part of one task, and the joined file that goes on after a kill. No torch here.

The joined files, in one folder:

    tokens.bin, offsets.bin, digests.bin   see `token_file.py`
    journal.jsonl                          after each part: sizes and SHA-256 of the three, its result

A file that lost its end when a node failed contradicts the journal, and is cut back to where they agree.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

TOKEN_FILES = ("tokens.bin", "offsets.bin", "digests.bin")
_COPY_BYTES = 1 << 22
_LENGTHS, _DIGESTS = ".lengths", ".digests"
"""Suffixes of the files beside the tokens of a part."""


def part_files(part: Path) -> tuple[Path, ...]:
    """Return the files of a part: tokens, lengths and digests."""
    return part, part.with_name(part.name + _LENGTHS), part.with_name(part.name + _DIGESTS)


class PartWriter:
    """Writer of the documents of one task: their tokens, lengths and digests.

    Args:
        path: file of the tokens; the others are beside it.
        end_of_document_id: token that ends each document; None: its own last one does.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], end_of_document_id: int | None) -> None:
        self._path, self._dtype, self._end = path, dtype, end_of_document_id
        self._file = path.open("wb")
        self._lengths, self._digests = array("q"), array("Q")
        self._length = 0

    def write(self, tokens: NDArray[Any]) -> None:
        """Append tokens to the present document."""
        self._file.write(tokens.astype(self._dtype, copy=False).tobytes())
        self._length += len(tokens)

    def write_documents(
        self, tokens: NDArray[Any], lengths: NDArray[np.int64], digests: NDArray[np.uint64]
    ) -> None:
        """Append whole documents, each with its end."""
        self._file.write(tokens.astype(self._dtype, copy=False).tobytes())
        self._lengths.frombytes(lengths.tobytes())
        self._digests.frombytes(digests.tobytes())

    def end_document(self, digest: int) -> bool:
        """End the present document; return False if it has no token, and is none."""
        if not self._length:
            return False
        if self._end is not None:
            self.write(np.array([self._end]))
        self._lengths.append(self._length)
        self._digests.append(digest)
        self._length = 0
        return True

    def discard_document(self) -> None:
        """Remove the tokens of the present document."""
        if self._length:
            self._file.seek(-self._length * self._dtype.itemsize, os.SEEK_END)
            self._file.truncate()
            self._length = 0

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if error is None:
                _, lengths_path, digests_path = part_files(self._path)
                lengths_path.write_bytes(self._lengths.tobytes())
                digests_path.write_bytes(self._digests.tobytes())


class TokenFileWriter:
    """Writer of the three files of a token file, one part after the other; goes on where a killed one was.

    Args:
        identity: facts that determine the parts; files of another identity are written anew.
        stores_tokens: False: the tokens are hashed and not written, because a file holds them already.

    Attributes:
        hashes: SHA-256 of each file, once it is closed.
        documents: number of documents so far.
        tokens: number of tokens so far.
    """

    def __init__(
        self, folder: Path, dtype: np.dtype[Any], identity: dict[str, Any], stores_tokens: bool = True
    ) -> None:
        self.folder, self.hashes, self.documents, self.tokens = folder, dict[str, str](), 0, 0
        self._dtype, self._stores_tokens = dtype, stores_tokens
        self._identity = {**identity, "stores_tokens": stores_tokens, "format": 1}
        self._hashes = [hashlib.sha256() for _ in TOKEN_FILES]
        self._written: deque[dict[str, Any]] = deque()
        with ExitStack() as stack:
            self._resume()
            self._files = [stack.enter_context((folder / name).open("ab")) for name in TOKEN_FILES]
            self._journal: IO[str] = stack.enter_context(self._journal_path.open("a", encoding="utf-8"))
            self._stack = stack.pop_all()
        if not self.documents and not self._files[1].tell():
            self.write_bytes(1, np.zeros(1, "<i8").tobytes())

    def written_result(self, task: str) -> dict[str, Any] | None:
        """Return the result of a task whose part was written before a kill; None: it is to be done.

        Tasks are asked for in their order.

        Raises:
            JournalMismatchError: the files were written by other tasks.
        """
        if not self._written:
            return None
        record = self._written.popleft()
        if record["task"] != task:
            raise JournalMismatchError(task)
        result: dict[str, Any] = record["result"]
        return result

    def append(self, part: Path, task: str, result: dict[str, Any]) -> None:
        """Append the files of a part, and remove them."""
        _, lengths_path, digests_path = part_files(part)
        with part.open("rb") as stream:
            while block := stream.read(_COPY_BYTES):
                self.write_bytes(0, block)
        lengths = np.frombuffer(lengths_path.read_bytes(), "<i8")
        self.write_bytes(1, (self.tokens + np.cumsum(lengths, dtype="<i8")).tobytes())
        self.write_bytes(2, digests_path.read_bytes())
        self.documents += len(lengths)
        self.tokens += int(lengths.sum())
        for file in self._files:
            file.flush()
        print(json.dumps(self._record(task, result)), file=self._journal, flush=True)
        for path in (part, lengths_path, digests_path):
            path.unlink()

    def write_bytes(self, number: int, content: bytes) -> None:
        """Append bytes to one of the three files."""
        self._hashes[number].update(content)
        if number or self._stores_tokens:
            self._files[number].write(content)

    def __enter__(self) -> TokenFileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            if error is None:
                for file in self._files:
                    file.flush()
                    os.fsync(file.fileno())
                digests = (one.hexdigest() for one in self._hashes)
                self.hashes = dict(zip(TOKEN_FILES, digests, strict=True))
        if error is None:
            self._journal_path.unlink()
            if not self._stores_tokens:
                (self.folder / TOKEN_FILES[0]).unlink()

    @property
    def _journal_path(self) -> Path:
        return self.folder / "journal.jsonl"

    def _record(self, task: str, result: dict[str, Any]) -> dict[str, Any]:
        return {
            "task": task,
            "tokens": self.tokens,
            "documents": self.documents,
            "sizes": [file.tell() for file in self._files],
            "hashes": [one.hexdigest() for one in self._hashes],
            "result": result,
        }

    def _resume(self) -> None:
        """Keep the parts that the journal and the files agree on, and cut off the rest.

        Tokens that were not written cannot be compared: then nothing is kept.
        """
        records = self._read_journal() if self._stores_tokens else []
        sizes = [0] * len(TOKEN_FILES)
        with ExitStack() as stack:
            files = []
            for name in TOKEN_FILES if records else ():
                path = self.folder / name
                path.touch()
                files.append(stack.enter_context(path.open("rb")))
            for record in records:
                hashes = [one.copy() for one in self._hashes]
                for file, one, start, end in zip(files, hashes, sizes, record["sizes"], strict=True):
                    _hash_range(file, one, end - start)
                if [one.hexdigest() for one in hashes] != record["hashes"]:
                    break
                self._hashes, sizes = hashes, record["sizes"]
                self.tokens, self.documents = record["tokens"], record["documents"]
                self._written.append(record)
        for name, size in zip(TOKEN_FILES, sizes, strict=True):
            with (self.folder / name).open("ab") as written:
                written.truncate(size)
        lines = [json.dumps({"identity": self._identity}), *map(json.dumps, self._written)]
        self._journal_path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def _read_journal(self) -> list[dict[str, Any]]:
        """Return the records of a journal of the same identity, up to one that is cut."""
        records: list[dict[str, Any]] = []
        try:
            lines = self._journal_path.read_text(encoding="utf-8").splitlines()
            if not lines or json.loads(lines[0])["identity"] != self._identity:
                return []
            for line in lines[1:]:
                records.append(json.loads(line))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            pass
        return records


class JournalMismatchError(Exception):
    """Error: files that other tasks have begun, which are to be removed."""


def _hash_range(file: IO[bytes], content_hash: Any, size: int) -> None:
    """Add the next `size` bytes of a file to a hash."""
    while size > 0 and (block := file.read(min(size, _COPY_BYTES))):
        content_hash.update(block)
        size -= len(block)
