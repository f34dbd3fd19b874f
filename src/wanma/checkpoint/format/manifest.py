"""Format of a checkpoint: names, the manifest with its checksum, and the safetensors header.

Torch-free and without side effects: bytes in, validated objects out. docs/reference/checkpoint-format.md is
the description for readers in other languages; every change here changes it too, with `VERSION`.

    step-00000100/
        manifest.json               the manifest of this module; its checksum on its first line
        rank-00000.safetensors      the shards that rank 0 wrote
        rank-00001.safetensors      ...

An incremental checkpoint also has, as hard links, the data files of the full one before it. Of some tensors
its own files hold the rows alone that have changed since.

        base-00000.safetensors      rank-00000.safetensors of the full checkpoint
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from wanma.job.errors import WanmaError

FORMAT = "wanma-checkpoint"
VERSION = 2
MANIFEST_FILE = "manifest.json"

DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of one element by dtype, in the safetensors spelling that the manifest uses too."""

_BASE_PREFIX = "base-"
DATA_FILE_PATTERN = re.compile(r"(?:rank|base)-(\d{5,})\.safetensors")
CHANGED_ROWS = ".changed_rows"
"""Suffix of the tensor with the numbers of changed rows, (changed,) I64, in a data file."""
CHANGED_VALUES = ".changed_values"
"""Suffix of the tensor with the changed rows themselves, (changed, ...)."""
METADATA_KEY = "__metadata__"
"""Key of the only entry of a safetensors header that is not a tensor."""
MAX_HEADER_BYTES = 100_000_000
"""Maximum length in bytes of a safetensors header that readers accept (safetensors specification)."""
DATA_ALIGNMENT = 64
"""Alignment in bytes of the start of the data, so that every element is aligned when mapped."""


def step_folder_name(step: int) -> str:
    """Return the folder name of a committed checkpoint."""
    return f"step-{step:08d}"


def data_file_name(rank: int) -> str:
    """Return the file name of the shards that `rank` wrote."""
    return f"rank-{rank:05d}.safetensors"


def base_file_name(name: str) -> str:
    """Return the name that a data file of a full checkpoint has in the incremental ones after it."""
    return name.replace("rank-", _BASE_PREFIX)


def is_base_file(name: str) -> bool:
    """Return whether a data file is that of a full checkpoint before; it also holds tensors of its own."""
    return name.startswith(_BASE_PREFIX)


# ---------------------------------------------------------------- boxes


@dataclass(frozen=True)
class Box:
    """Rectangular part of a full tensor: offset and size per dimension, in elements."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices of a full tensor that are this box."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True))


Slices = tuple[slice, ...]


def intersect_boxes(wanted: Box, saved: Box) -> tuple[Slices, Slices] | None:
    """Return the intersection of two boxes of one tensor.

    Returns:
        The common part as slices of a tensor that holds `wanted` and of one that holds `saved`;
        None where they have no element in common. Tensors without dimensions intersect in `((), ())`.
    """
    target_slices: list[slice] = []
    source_slices: list[slice] = []
    for target_start, size, saved_start, length in zip(
        wanted.offset, wanted.shape, saved.offset, saved.shape, strict=True
    ):
        start, stop = max(target_start, saved_start), min(target_start + size, saved_start + length)
        if start >= stop:
            return None
        target_slices.append(slice(start - target_start, stop - target_start))
        source_slices.append(slice(start - saved_start, stop - saved_start))
    return tuple(target_slices), tuple(source_slices)


# ---------------------------------------------------------------- the manifest


@dataclass(frozen=True)
class SavedShard:
    """Saved box of a tensor; its data is in `file` under the tensor's own name."""

    box: Box
    file: str


@dataclass(frozen=True)
class ChangedRows:
    """Rows that replace those of a tensor's shards: some of all, in `file`."""

    file: str
    count: int


@dataclass(frozen=True)
class TensorEntry:
    """Entry of one tensor: its dtype, its full shape and the boxes that together cover it."""

    dtype: str
    shape: tuple[int, ...]
    shards: tuple[SavedShard, ...]
    changes: tuple[ChangedRows, ...] = ()
    """Rows that have changed since the shards were saved; no row comes twice."""


@dataclass(frozen=True)
class FileEntry:
    """Entry of one data file: its size and the SHA-256 of its content, in hexadecimal."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Manifest of a checkpoint: step, state, data files and tensors."""

    step: int
    world_size: int
    metric: float | None
    state: dict[str, Any]
    rank_state: dict[int, dict[str, Any]] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Size of all data files, in bytes."""
        return sum(entry.bytes for entry in self.files.values())

    @property
    def written_bytes(self) -> int:
        """Size of the data files that are this checkpoint's own, in bytes."""
        return sum(entry.bytes for name, entry in self.files.items() if not is_base_file(name))


def dump_manifest(manifest: Manifest) -> bytes:
    """Return the content of the manifest file; the checksum covers every byte after the first line feed."""
    body = {
        "step": manifest.step,
        "world_size": manifest.world_size,
        "metric": manifest.metric,
        "state": manifest.state,
        "rank_state": {str(rank): state for rank, state in manifest.rank_state.items()},
        "files": {
            name: {"bytes": entry.bytes, "sha256": entry.sha256} for name, entry in manifest.files.items()
        },
        "tensors": {
            name: {
                "dtype": entry.dtype,
                "shape": entry.shape,
                "shards": [
                    {"file": shard.file, "offset": shard.box.offset, "shape": shard.box.shape}
                    for shard in entry.shards
                ],
                **(
                    {"changed_rows": [{"file": one.file, "count": one.count} for one in entry.changes]}
                    if entry.changes
                    else {}
                ),
            }
            for name, entry in manifest.tensors.items()
        },
    }
    content = b'"manifest":' + dump_json(body, "the checkpoint's state").encode() + b"}\n"
    # Older readers know a manifest without changed rows.
    version = VERSION if any(map(is_base_file, manifest.files)) else 1
    first = {"format": FORMAT, "version": version, "sha256": hashlib.sha256(content).hexdigest()}
    return json.dumps(first, separators=(",", ":"))[:-1].encode() + b",\n" + content


def parse_manifest(content: bytes) -> Manifest:
    """Verify and parse a manifest.

    Raises:
        WanmaError: it is damaged, is no manifest, or was written by a newer wanma.
    """
    first, _, body = content.partition(b"\n")
    try:
        head = json.loads(first.decode().rstrip(",") + "}")
        is_known_format, version = head["format"] == FORMAT, head["version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WanmaError(f"{MANIFEST_FILE} is not the manifest of a checkpoint") from error
    if not is_known_format or not isinstance(version, int) or version < 1:
        raise WanmaError(f"{MANIFEST_FILE} is not the manifest of a checkpoint")
    if version > VERSION:
        raise WanmaError(
            f"{MANIFEST_FILE} has format version {version}; this version of wanma reads up to {VERSION}",
            "update wanma",
        )
    if hashlib.sha256(body).hexdigest() != head.get("sha256"):
        raise WanmaError(f"{MANIFEST_FILE} is damaged: its content differs from its SHA-256")
    try:
        return _manifest(json.loads(b"{" + body)["manifest"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WanmaError(f"{MANIFEST_FILE} is malformed: {type(error).__name__} {error}") from error


def _manifest(value: dict[str, Any]) -> Manifest:
    """Build a manifest from a parsed body; raises ValueError, KeyError or TypeError for invalid values."""
    files = {name: FileEntry(int(v["bytes"]), str(v["sha256"])) for name, v in value["files"].items()}
    for name in files:
        if not DATA_FILE_PATTERN.fullmatch(name):  # in particular: nothing outside the folder
            raise ValueError(f"file name {name!r}")
    tensors = {}
    for name, entry in value["tensors"].items():
        shape = _sizes(entry["shape"])
        if entry["dtype"] not in DTYPE_BYTES:
            raise ValueError(f"dtype {entry['dtype']!r} of {name}")
        shards = []
        for shard in entry["shards"]:
            box = Box(_sizes(shard["offset"]), _sizes(shard["shape"]))
            is_inside = len(box.offset) == len(box.shape) == len(shape) and all(
                start + size <= full for start, size, full in zip(box.offset, box.shape, shape, strict=True)
            )
            if not is_inside or shard["file"] not in files:
                raise ValueError(f"shard {shard} of {name}")
            shards.append(SavedShard(box, shard["file"]))
        changes = tuple(ChangedRows(one["file"], one["count"]) for one in entry.get("changed_rows", ()))
        for change in changes:
            if change.file not in files or not shape or not 0 < _sizes([change.count])[0] <= shape[0]:
                raise ValueError(f"changed rows {change} of {name}")
        tensors[name] = TensorEntry(entry["dtype"], shape, tuple(shards), changes)
    metric = value["metric"]
    return Manifest(
        step=int(value["step"]),
        world_size=int(value["world_size"]),
        metric=None if metric is None else float(metric),
        state=dict(value["state"]),
        rank_state={int(rank): dict(state) for rank, state in value["rank_state"].items()},
        files=files,
        tensors=tensors,
    )


def _sizes(value: Iterable[Any]) -> tuple[int, ...]:
    sizes = tuple(value)
    if not all(isinstance(size, int) and size >= 0 for size in sizes):
        raise ValueError(f"sizes {sizes}")
    return sizes


def dump_json(value: Any, subject: str) -> str:
    """Format `value` as compact standard JSON.

    Raises:
        WanmaError: JSON cannot express a part of `value`, such as NaN or infinity.
    """
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise WanmaError(
            f"{subject} cannot be written as JSON: {error}",
            "use finite numbers, strings, lists and dictionaries; put arrays among the tensors",
        ) from error


# ---------------------------------------------------------------- the safetensors header


@dataclass(frozen=True)
class FileRegion:
    """Location of one tensor in a safetensors file, in bytes from the file's beginning."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def build_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, FileRegion]]:
    """Build the header of a safetensors file for tensors given as name -> (dtype, shape).

    Wide elements go first, so that without gaps (the specification allows none) all are aligned.
    """
    order = sorted(tensors, key=lambda name: (-DTYPE_BYTES[tensors[name][0]], name))
    header: dict[str, Any] = {METADATA_KEY: {"format": "pt"}}
    position = 0
    for name in order:
        dtype, shape = tensors[name]
        stop = position + DTYPE_BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT)
    base = 8 + len(text)
    regions = {}
    for name in order:
        start, stop = header[name]["data_offsets"]
        regions[name] = FileRegion(*tensors[name], base + start, base + stop)
    return len(text).to_bytes(8, "little") + text, regions


def parse_header(content: bytes | memoryview, file_bytes: int) -> dict[str, FileRegion]:
    """Parse the header of a safetensors file that begins with `content` and is `file_bytes` long.

    Raises:
        ValueError: it is no safetensors file, or a tensor reaches beyond its end.
    """
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(MAX_HEADER_BYTES, file_bytes - 8):
        raise ValueError("no safetensors header")
    regions = {}
    try:
        for name, entry in json.loads(bytes(content[8 : 8 + length])).items():
            if name == METADATA_KEY:
                continue
            start, stop = (8 + length + int(offset) for offset in entry["data_offsets"])
            region = FileRegion(str(entry["dtype"]), _sizes(entry["shape"]), start, stop)
            needed_bytes = DTYPE_BYTES[region.dtype] * math.prod(region.shape)
            if not (8 + length <= start and stop <= file_bytes and stop - start == needed_bytes):
                raise ValueError(f"tensor {name} reaches outside the file")
            regions[name] = region
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"malformed safetensors header: {type(error).__name__} {error}") from error
    return regions
