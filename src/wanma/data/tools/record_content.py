"""Content of records, equal whatever format stores it: decoded fields and size.

Files of a WebDataset sample are decoded by their suffix, and its `.json` file gives fields of the
record.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from wanma.data.formats.byte_ranges import describe_fault
from wanma.data.formats.format import Format, Record
from wanma.data.formats.image_folder import IMAGE_SUFFIXES
from wanma.data.formats.tar_samples import TarSamples

_KEY_FIELD = "__key__"
_BINARY_SUFFIXES = (*IMAGE_SUFFIXES, "bin", "npy")
"""Suffixes of files of a sample whose names are those of fields without them."""
_TEXT_SUFFIXES = ("txt", "text", "transcript")
_NUMBER_SUFFIXES = ("cls", "cls2", "class", "count", "index", "inx", "id")
"""Suffixes of texts and of numbers in `webdataset.autodecode`; a number may be a text here."""
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")


def record_decoder(data_format: Format) -> Callable[[Record], Record]:
    """Return the function that decodes the fields of a record which its format leaves as bytes."""
    return decode_tar_record if isinstance(data_format, TarSamples) else lambda record: record


def decode_tar_record(record: Record) -> Record:
    """Decode the files of a WebDataset sample by their suffix; images and unknown ones stay bytes.

    Raises:
        ValueError: a file does not hold what its suffix says.
    """
    stems = Counter(name.rpartition(".")[0] for name in record)
    decoded: Record = {}
    for name, value in record.items():
        stem, _, suffix = name.rpartition(".")
        plain_name = stem if stem and stems[stem] == 1 and stem not in record else name
        if name == _KEY_FIELD:
            decoded[name] = value
        elif suffix in ("json", "jsn"):
            content = _decode(name, json.loads, bytes(value))
            if isinstance(content, dict) and not stem and not content.keys() & record.keys():
                decoded |= content
            else:
                decoded[name] = content
        elif suffix in _TEXT_SUFFIXES:
            decoded[name] = _decode(name, bytes.decode, bytes(value))
        elif suffix in _NUMBER_SUFFIXES:
            decoded[name] = _decode(name, _number_or_text, bytes(value))
        elif suffix == "npy":
            decoded[plain_name] = _decode(name, _load_array, bytes(value))
        else:
            decoded[plain_name if suffix in _BINARY_SUFFIXES else name] = value
    return decoded


def _number_or_text(content: bytes) -> int | str:
    text = content.decode()
    return int(text) if _INTEGER.fullmatch(text.strip()) else text


def _load_array(content: bytes) -> Any:
    return np.load(io.BytesIO(content), allow_pickle=False)


def _decode(name: str, decode: Callable[[bytes], Any], content: bytes) -> Any:
    try:
        return decode(content)
    except (ValueError, RecursionError, EOFError) as error:
        raise ValueError(f"the file .{name} cannot be decoded: {describe_fault(error)}") from error


def content_bytes(value: Any) -> int:
    """Return the size of a value in bytes: of texts in UTF-8, of numbers and arrays in memory."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, bytes | bytearray | memoryview):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(content_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(content_bytes, value))
    return 0 if value is None else 8
