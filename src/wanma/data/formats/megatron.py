"""Megatron's indexed data sets: tokens in a .bin file, positions in the .idx file beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from wanma.data.formats.byte_ranges import RangeFormat, RangeScan
from wanma.data.formats.format import BadDataError, Certainty, Content, DataFile, FileGroup, Probe, Record
from wanma.data.stores.byte_source import ByteSource

_MAGIC = b"MMIDIDX\0\0"
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
"""Codes of `DType` in megatron.core.datasets.indexed_dataset."""
_FLOAT_CODES = (6, 7)
"""Codes that stand for float32 in some versions and float64 in others: the size of an item decides."""


@dataclass(frozen=True)
class Megatron(RangeFormat):
    """Pairs of .bin and .idx of Megatron-Core.

    A sample is `{"tokens": array}`; it views the file where that is mapped.

    Args:
        unit: "document": a sample is a document, all its sequences joined; "sequence": it is one sequence.
    """

    unit: Literal["document", "sequence"] = "document"
    name: ClassVar[str] = "megatron"
    suffixes: ClassVar[tuple[str, ...]] = (".idx",)
    markers: ClassVar[tuple[str, ...]] = ("*.idx",)

    def detect(self, probe: Probe) -> Certainty:
        return Certainty.SURE if probe.head.startswith(_MAGIC) else Certainty.NO

    def compression(self, head: bytes) -> str:
        return ""  # tokens may look like a magic number

    def group(self, files: Sequence[DataFile]) -> list[FileGroup]:
        by_url = {file.url: file for file in files}
        groups = []
        for url, file in by_url.items():
            stem, dot, suffix = url.rpartition(".")
            other = {"bin": "idx", "idx": "bin"}.get(suffix if dot else "")
            if other is None:
                raise BadDataError(url, "it is neither a .bin nor an .idx file")
            if f"{stem}.{other}" not in by_url:
                raise BadDataError(url, f"the file .{other} beside it is missing", hint="name both files")
            if suffix == "bin":
                groups.append(FileGroup((file, by_url[f"{stem}.idx"])))
        return groups

    def scan_ranges(self, source: ByteSource, group: FileGroup) -> RangeScan:
        index = _IndexFile(group.open(1))
        starts, ends, documents = index.read()
        if len(ends) and int(ends.max()) > source.size:
            first = int(np.argmax(ends > source.size))
            raise BadDataError(
                source.url,
                f"truncated: it has {source.size:,} bytes, the .idx file says {int(ends.max()):,}",
                first if self.unit == "sequence" else None,
            )
        if self.unit == "document":
            if not (starts[1:] == ends[:-1]).all():
                raise BadDataError(
                    group.url,
                    "its sequences do not follow each other, so that documents cannot be read",
                    hint="set the option unit='sequence'",
                )
            bounds = np.concatenate([starts, ends[-1:]])
            is_filled = documents[1:] > documents[:-1]
            starts, ends = bounds[documents[:-1]][is_filled], bounds[documents[1:]][is_filled]
        return RangeScan(starts, ends, {"dtype": index.dtype.str})

    def parse(self, content: Content, facts: Mapping[str, Any]) -> Record:
        return {"tokens": np.frombuffer(content, facts["dtype"])}


class _IndexFile:
    """Reader of an .idx file."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._content = memoryview(source.read(0, source.size))
        self._position = 0
        self.dtype: np.dtype[Any] = np.dtype("u1")

    def read(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return first and last byte (exclusive) of each sequence, and the first sequence of each document.

        The last element of the documents is the number of sequences.
        """
        if bytes(self._content[: len(_MAGIC)]) != _MAGIC:
            raise self._fault("it is no index of Megatron-Core")
        self._position = len(_MAGIC)
        if (version := int(self._take("<u8", 1)[0])) != 1:
            raise self._fault(f"its version is {version}; 1 is known")
        starts, ends, documents = self._read_tables()
        sequences = len(starts)
        if (starts < 0).any() or (ends < starts).any():
            raise self._fault("a sequence has a negative position or length")
        if not len(documents) or documents[0] != 0 or documents[-1] != sequences:
            raise self._fault(f"its documents do not cover its {sequences} sequences")
        if (np.diff(documents) < 0).any():
            raise self._fault("its documents are not in order")
        return starts, ends, documents

    def _read_tables(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        code = int(self._take("<u1", 1)[0])
        sequences, documents = (int(number) for number in self._take("<u8", 2))
        lengths = self._take("<i4", sequences).astype(np.int64)
        starts = self._take("<i8", sequences).astype(np.int64)
        document_starts = self._take("<i8", documents).astype(np.int64)
        rest = len(self._content) - self._position
        if rest not in (0, sequences):  # one byte a sequence: its mode
            raise self._fault(f"{rest} bytes follow the positions of its documents")
        item_size = 0
        if code in _FLOAT_CODES and (filled := np.flatnonzero(lengths[:-1])).size:
            first = int(filled[0])
            item_size = int(starts[first + 1] - starts[first]) // int(lengths[first])
        self.dtype = self._dtype(code, item_size)
        return starts, starts + lengths * self.dtype.itemsize, document_starts

    def _dtype(self, code: int, item_size: int) -> np.dtype[Any]:
        if code in _FLOAT_CODES and item_size in (4, 8):
            return np.dtype(f"<f{item_size}")
        if code not in _DTYPES:
            raise self._fault(f"its type of items has the unknown code {code}")
        return np.dtype(_DTYPES[code])

    def _take(self, dtype: str, count: int) -> NDArray[Any]:
        size = count * np.dtype(dtype).itemsize
        if self._position + size > len(self._content):
            raise self._fault(f"truncated: it has {len(self._content):,} bytes")
        values = np.frombuffer(self._content, dtype, count, self._position)
        self._position += size
        return values

    def _fault(self, cause: str) -> BadDataError:
        return BadDataError(self._source.url, cause)
