"""Tokens that a local file holds in the form of a token file, mapped and not copied. No torch here."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wanma.data.documents.document_groups import DocumentGroup, openable_group, reading_format
from wanma.data.formats.format import BadDataError, Layout
from wanma.data.stores.filesystems import is_local
from wanma.data.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class StoredTokens:
    """Range of a local file that holds the tokens of a corpus, each document with its end."""

    path: str
    offset: int
    size: int

    def map(self, dtype: str) -> NDArray[Any]:
        """Map the tokens, read-only.

        Raises:
            FileNotFoundError: the file is gone.
            ValueError: it is shorter now.
        """
        count = self.size // np.dtype(dtype).itemsize
        return np.memmap(self.path, dtype, "r", offset=self.offset, shape=(count,))

    def sha256(self) -> str:
        """Return the hash of the range."""
        with Path(self.path).open("rb") as file:
            start = self.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            mapped = mmap.mmap(
                file.fileno(), self.offset - start + self.size, access=mmap.ACCESS_READ, offset=start
            )
            with mapped, memoryview(mapped) as view:
                return hashlib.sha256(view[self.offset - start :]).hexdigest()


def find_stored_tokens(groups: Sequence[DocumentGroup], tokenizer: Tokenizer) -> StoredTokens | None:
    """Return the range of tokens that can be mapped as it is; None: the corpus is to be copied.

    That takes one local file of Megatron or numpy with the tokenizer's type of integer, whose documents
    follow each other and all end with the tokenizer's end of document.
    """
    filled = [group for group in groups if group.size]
    if len(filled) != 1 or filled[0].format_name not in ("megatron", "numpy"):
        return None
    (group,) = filled
    if group.is_compressed or not is_local(group.files[0].filesystem):
        return None
    data_format = reading_format(group)
    try:
        layout = data_format.scan(openable_group(group, None))
    except BadDataError:  # told when it is read
        return None
    found = _document_ranges(layout) if group.format_name == "megatron" else _array_ranges(layout)
    if found is None:
        return None
    starts, ends, dtype = found
    is_same_type = dtype == tokenizer.dtype or (dtype.str, tokenizer.dtype.str) == ("<i4", "<u4")
    if not is_same_type or not len(starts) or not (starts[1:] == ends[:-1]).all():
        return None
    if (ends - starts < 2 * dtype.itemsize).any():  # empty documents are left out
        return None
    first, last = int(starts[0]), int(ends[-1])
    tokens = StoredTokens(group.files[0].path, first, last - first)
    positions = (ends - first) // dtype.itemsize - 1
    return tokens if (tokens.map(dtype.str)[positions] == tokenizer.end_of_document_id).all() else None


Ranges = tuple[NDArray[np.int64], NDArray[np.int64], np.dtype[Any]]
"""First and last byte (exclusive) of each document, and the type of a token."""


def _document_ranges(layout: Layout) -> Ranges | None:
    tables = layout.tables
    return np.asarray(tables["starts"]), np.asarray(tables["ends"]), np.dtype(layout.facts["dtype"])


def _array_ranges(layout: Layout) -> Ranges | None:
    arrays = layout.facts["arrays"]
    ((offset, dtype, shape, _, _, is_deflated),) = arrays.values()
    if is_deflated or isinstance(dtype, list):
        return None
    element = np.dtype(dtype)
    rows, width = (1, shape[0]) if len(shape) == 1 else shape
    starts = offset + np.arange(rows, dtype=np.int64) * width * element.itemsize
    return starts, starts + width * element.itemsize, element
