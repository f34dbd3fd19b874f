"""MDS: shards of mosaicml-streaming, described by the `index.json` beside them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar

import numpy as np

from wanma.data.formats.byte_ranges import RangeFormat, RangeScan
from wanma.data.formats.format import BadDataError, Certainty, Content, DataFile, FileGroup, Probe, Record
from wanma.data.stores.byte_source import ByteSource

_COMPRESSIONS = {"gz": "gzip", "zstd": "zstd", "bz2": "bzip2", "br": "brotli", "snappy": "snappy"}
"""Names of compressions in `index.json`, and ours."""
_SHAPE_DTYPES = ("<u1", "<u2", "<u4", "<u8")
_VALUE_DTYPES = {
    8: "<u1",
    9: "<i1",
    16: "<u2",
    17: "<i2",
    18: "<f2",
    32: "<u4",
    33: "<i4",
    34: "<f4",
    64: "<u8",
    65: "<i8",
    66: "<f8",
}
"""Codes of types of values in `streaming.base.format.mds.encodings`."""
_ARRAY_OPTIONS = re.compile(r"(|u?int(8|16|32|64)|float(16|32|64))(:\d+(,\d+)*)?")
"""Type and shape in the encoding of an array; both may be left out."""
_SCALARS = tuple(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))
_FLOATS = ("float16", "float32", "float64")
_MODES = {"L": 1, "RGB": 3, "RGBA": 4}
"""Channels of images by their mode."""


@dataclass(frozen=True)
class Mds(RangeFormat):
    """MDS shards with their `index.json`, also compressed shards.

    Numbers, texts, JSON and arrays are decoded; images stay bytes, except raw ones (`pil`), which are arrays.
    A compressed shard of more than 8 MiB costs a plain copy in the scratch folder. Pickled columns are
    refused.
    """

    name: ClassVar[str] = "mds"
    suffixes: ClassVar[tuple[str, ...]] = (".mds",)
    markers: ClassVar[tuple[str, ...]] = ("index.json",)

    def detect(self, probe: Probe) -> Certainty:
        if probe.name != "index.json":
            return Certainty.NO
        head = probe.head.lstrip()
        fits = head.startswith(b"{") and b'"shards"' in head and b'"mds"' in head
        return Certainty.SURE if fits else Certainty.NO

    def group(self, files: Sequence[DataFile]) -> list[FileGroup]:
        by_url = {file.url: file for file in files}
        indexes = [url for url in by_url if url.rpartition("/")[2] == "index.json"]
        if not indexes:
            raise BadDataError(
                files[0].url if files else "", "the index.json of MDS is missing", hint="name its folder"
            )
        groups, used = [], set(indexes)
        for url in indexes:
            folder = url.rpartition("/")[0]
            for shard in _read_index(by_url[url]):
                file, compression = _find_shard(folder, shard, by_url)
                facts = {
                    key: shard[key] for key in ("column_names", "column_encodings", "column_sizes", "samples")
                }
                facts |= {"compression": compression, "bytes": shard["raw_data"]["bytes"]}
                groups.append(FileGroup((file,), facts))
                used |= {
                    f"{folder}/{shard[kind]['basename']}" for kind in ("raw_data", "zip_data") if shard[kind]
                }
        if unused := sorted(by_url.keys() - used):
            raise BadDataError(unused[0], "no index.json describes it", hint="remove it, or name other files")
        return groups

    def compression(self, head: bytes, group: FileGroup) -> str:
        return str(group.facts["compression"])

    def scan_ranges(self, source: ByteSource, group: FileGroup) -> RangeScan:
        facts = group.facts
        if source.size != facts["bytes"]:
            raise BadDataError(
                source.url,
                f"{source.size:,} bytes, but index.json says {facts['bytes']:,}: truncated or changed",
            )
        for name, encoding in zip(facts["column_names"], facts["column_encodings"], strict=True):
            _decoder(source.url, name, encoding)
        samples = facts["samples"]
        head = source.read(0, 4 * (samples + 2))
        if len(head) < 4 * (samples + 2) or int.from_bytes(head[:4], "little") != samples:
            raise BadDataError(source.url, f"it does not begin with its number of samples, {samples}")
        offsets = np.frombuffer(head, "<u4", offset=4).astype(np.int64)
        if (np.diff(offsets) < 0).any() or offsets[0] < len(head) or offsets[-1] != source.size:
            raise BadDataError(source.url, "the positions of its samples are damaged")
        columns = {key: facts[key] for key in ("column_names", "column_encodings", "column_sizes")}
        return RangeScan(offsets[:-1], offsets[1:], columns)

    def parse(self, content: Content, facts: Mapping[str, Any]) -> Record:
        view = memoryview(content)
        sizes, position = [], 0
        for size in facts["column_sizes"]:
            if not size:
                size = int.from_bytes(view[position : position + 4], "little")
                position += 4
            sizes.append(size)
        if position + sum(sizes) != len(view):
            raise ValueError(f"its columns have {position + sum(sizes)} bytes, the sample {len(view)}")
        record: Record = {}
        for name, encoding, size in zip(facts["column_names"], facts["column_encodings"], sizes, strict=True):
            try:
                record[name] = _decoder("", name, encoding)(view[position : position + size])
            except (ValueError, IndexError, KeyError, ArithmeticError) as error:
                raise ValueError(f"the column {name!r} is no {encoding}: {error}") from error
            position += size
        return record


def _read_index(file: DataFile) -> list[dict[str, Any]]:
    """Read an index.json, and check the entries that are used."""
    try:
        source = file.open()
        content = json.loads(bytes(source.read(0, source.size)))
        if content["version"] != 2:
            raise ValueError(f"its version is {content['version']}; 2 is known")
        shards: list[dict[str, Any]] = content["shards"]
        for shard in shards:
            if shard["format"] != "mds":
                raise ValueError(f"a shard of the format {shard['format']!r}; only mds is supported")
            columns = {len(shard[key]) for key in ("column_names", "column_encodings", "column_sizes")}
            if len(columns) != 1 or not isinstance(shard["samples"], int) or shard["samples"] < 0:
                raise ValueError("a shard whose columns differ in number, or without its number of samples")
            if not all(size is None or isinstance(size, int) for size in shard["column_sizes"]):
                raise ValueError(f"a shard with columns of the sizes {shard['column_sizes']}")
            if not isinstance(shard["compression"], str | None):
                raise ValueError(f"a shard of the compression {shard['compression']!r}")
            for kind in ("raw_data", "zip_data"):
                if shard[kind] is not None and "/" in shard[kind]["basename"]:
                    raise ValueError(f"the file {shard[kind]['basename']!r} is not beside it")
            if not isinstance(shard["raw_data"]["bytes"], int):
                raise ValueError("a shard without its size")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        cause = f"it misses {error}" if isinstance(error, KeyError) else str(error)
        raise BadDataError(file.url, f"damaged index of MDS: {cause}") from error
    return shards


def _find_shard(
    folder: str, shard: Mapping[str, Any], by_url: Mapping[str, DataFile]
) -> tuple[DataFile, str]:
    """Return the file of a shard and its compression; of both, the plain one is taken."""
    plain = f"{folder}/{shard['raw_data']['basename']}"
    if plain in by_url:
        return by_url[plain], ""
    if shard["zip_data"] is None:
        raise BadDataError(plain, "this shard is missing", hint="download it, or name its folder")
    compressed = f"{folder}/{shard['zip_data']['basename']}"
    if compressed not in by_url:
        raise BadDataError(compressed, "this shard is missing", hint="download it, or name its folder")
    name = (shard["compression"] or "").partition(":")[0]
    if name not in _COMPRESSIONS:
        raise BadDataError(compressed, f"it is compressed with the unknown {name!r}")
    return by_url[compressed], _COMPRESSIONS[name]


def _decoder(url: str, name: str, encoding: str) -> Callable[[memoryview], Any]:
    """Return the function that decodes a column."""
    kind, _, options = encoding.partition(":")
    if kind in ("bytes", "jpeg", "png"):
        return lambda data: data
    if kind == "ndarray" and _ARRAY_OPTIONS.fullmatch(options):
        return lambda data: _decode_array(data, options)
    if kind in _SIMPLE_DECODERS:
        return _SIMPLE_DECODERS[kind]
    if kind in ("pkl", "pickle"):
        raise BadDataError(
            url,
            f"the column {name!r} is pickled: reading it could run any program",
            hint="write it as json, str or ndarray",
        )
    raise BadDataError(url, f"the column {name!r} has the unknown encoding {encoding!r}")


def _scalar(dtype: str) -> Callable[[memoryview], Any]:
    def decode(data: memoryview) -> Any:
        (value,) = np.frombuffer(data, dtype).tolist()
        return value

    return decode


def _decode_array(data: memoryview, options: str) -> Any:
    """Decode an array: its type and its shape are in the encoding, or before the values."""
    parts = options.split(":") if options else []
    position = 0
    if parts:
        dtype = np.dtype(parts[0]).newbyteorder("<")
    else:
        dtype = np.dtype(_VALUE_DTYPES[data[0]])
        position = 1
    if len(parts) > 1:
        shape = tuple(int(size) for size in parts[1].split(","))
    else:
        dimensions, shape_dtype = data[position] >> 2, np.dtype(_SHAPE_DTYPES[data[position] & 3])
        shape = tuple(np.frombuffer(data, shape_dtype, dimensions, position + 1).tolist())
        position += 1 + dimensions * shape_dtype.itemsize
    return np.frombuffer(data[position:], dtype).reshape(shape)


def _decode_raw_image(data: memoryview) -> Any:
    """Decode a raw image: width, height, size of the mode, mode, pixels (height, width, channels)."""
    width, height, mode_size = np.frombuffer(data, "<u4", 3).tolist()
    mode = str(data[12 : 12 + mode_size], "utf-8")
    if mode not in _MODES:
        raise ValueError(f"a raw image of mode {mode!r}; {', '.join(_MODES)} are supported")
    pixels = np.frombuffer(data[12 + mode_size :], np.uint8)
    return pixels.reshape(height, width, _MODES[mode])


_SIMPLE_DECODERS: dict[str, Callable[[memoryview], Any]] = {
    "str": lambda data: str(data, "utf-8"),
    "int": _scalar("<i8"),
    **{name: _scalar(np.dtype(name).newbyteorder("<").str) for name in (*_SCALARS, *_FLOATS)},
    "str_int": lambda data: int(str(data, "utf-8")),
    "str_float": lambda data: float(str(data, "utf-8")),
    "str_decimal": lambda data: Decimal(str(data, "utf-8")),
    "json": lambda data: json.loads(str(data, "utf-8")),
    "pil": _decode_raw_image,
}
