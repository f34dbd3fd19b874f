"""File of a layout: facts and arrays, mapped into memory when it is opened.

8 bytes     magic number
uint64      size of the header
uint64      hash of the header
header      JSON: rows, facts, digests, and of each array its name, type, shape and position
arrays      each from a multiple of 64 bytes
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from wanma.data.formats.format import Layout

_MAGIC = b"WANMAIX\x02"
_ALIGNMENT = 64
_PREFIX_BYTES = 24


class LayoutFileCorruptError(Exception):
    """Error: a layout file contradicts its header; the message is the reason."""


def serialize(layout: Layout) -> Iterator[bytes | memoryview]:
    """Yield the content of a layout file, in parts; arrays are not copied."""
    tables: dict[str, tuple[str, list[int], int]] = {}
    position = 0
    for name, table in layout.tables.items():
        position = _aligned(position)
        tables[name] = (table.dtype.str, list(table.shape), position)
        position += table.nbytes
    header = json.dumps(
        {
            "rows": layout.rows,
            "facts": dict(layout.facts),
            "digest": layout.digest,
            "identity": layout.identity,
            "tables": tables,
            "size": position,
        }
    ).encode()
    header_hash = xxhash.xxh3_64_intdigest(header).to_bytes(8, "little")
    yield from (_MAGIC, len(header).to_bytes(8, "little"), header_hash, header)
    written = _PREFIX_BYTES + len(header)
    yield bytes(_aligned(written) - written)
    written = 0
    for (_, _, position), table in zip(tables.values(), layout.tables.values(), strict=True):
        yield bytes(position - written)
        yield array_bytes(table)
        written = position + table.nbytes


def open_layout(path: Path) -> Layout:
    """Map a layout file, whose header is verified.

    Raises:
        FileNotFoundError: there is no such file.
        LayoutFileCorruptError: its size or its header is wrong.
    """
    with path.open("rb") as file:
        prefix = file.read(_PREFIX_BYTES)
        header_size = int.from_bytes(prefix[8:16], "little")
        content = file.read(header_size)
        if prefix[:8] != _MAGIC or xxhash.xxh3_64_intdigest(content) != int.from_bytes(prefix[16:], "little"):
            raise LayoutFileCorruptError("its header is damaged")
        header: dict[str, Any] = json.loads(content)
        start = _aligned(_PREFIX_BYTES + header_size)
        size = file.seek(0, 2)
        if size != (start + header["size"] if header["size"] else size):
            raise LayoutFileCorruptError(f"it has {size} bytes, not {start + header['size']}")
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    tables: dict[str, NDArray[Any]] = {}
    for name, (dtype, shape, position) in header["tables"].items():
        count = int(np.prod(shape, dtype=np.int64))
        table = np.frombuffer(mapped, dtype, count, start + position) if count else np.empty(0, dtype)
        tables[name] = table.reshape(shape)
    return Layout(header["rows"], tables, header["facts"], header["digest"], header["identity"])


def hash_array(array: NDArray[Any]) -> str:
    """Return the hash of an array's values."""
    return xxhash.xxh3_128(array_bytes(array)).hexdigest()


def array_bytes(array: NDArray[Any]) -> memoryview:
    """Return the bytes of an array, without a copy of a contiguous one."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def hash_layout(layout: Layout, facts: Mapping[str, Any]) -> str:
    """Return the hash of a layout and of facts about its content."""
    tables = {
        name: [table.dtype.str, list(table.shape), hash_array(table)] for name, table in layout.tables.items()
    }
    text = json.dumps([layout.rows, tables, dict(layout.facts), layout.digest, dict(facts)], sort_keys=True)
    return xxhash.xxh3_128(text.encode("utf-8", "surrogatepass")).hexdigest()


def hash_json(value: Any) -> str:
    """Return the hash of a JSON-able value, 32 characters, as files of the cache are named."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _aligned(position: int) -> int:
    return (position + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
