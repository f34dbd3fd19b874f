"""Integrity scan: search of a checkpoint for every defect, on disk or at a URL. Torch-free.

`find_defects` stops as soon as a checkpoint is known to be invalid; a scan goes on, and also finds defects
that no hash reveals: tensors that the shards do not cover, files whose content contradicts the manifest.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from wanma.checkpoint.format.manifest import (
    CHANGED_ROWS,
    CHANGED_VALUES,
    MANIFEST_FILE,
    MAX_HEADER_BYTES,
    Box,
    FileEntry,
    Manifest,
    intersect_boxes,
    is_base_file,
    parse_header,
    parse_manifest,
    step_folder_name,
)
from wanma.job.errors import WanmaError

_READ_BYTES = 8 << 20


class FileAccess(Protocol):
    """Access to the files in a checkpoint's folder; `remote_storage.RemoteStorage` implements it too."""

    def read(self, path: str) -> bytes | None:
        """Return the content of a small file; None: no such file."""

    def size(self, path: str) -> int | None:
        """Return the bytes of a file; None: no such file, or not a regular file."""

    def open(self, path: str) -> Any:
        """Open a file for reading, as a context manager."""


class LocalFiles:
    """Access to the files of a folder on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, path: str) -> bytes | None:
        try:
            return (self._path / path).read_bytes()
        except FileNotFoundError:
            return None

    def size(self, path: str) -> int | None:
        try:
            status = (self._path / path).stat()
        except FileNotFoundError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def open(self, path: str) -> IO[bytes]:
        return (self._path / path).open("rb")


@dataclass(frozen=True)
class Defect:
    """Defect of one file."""

    file: str
    cause: str


@dataclass(frozen=True)
class ScanResult:
    """Result of the scan of one checkpoint."""

    name: str
    manifest: Manifest | None
    """Manifest; None: it cannot be read."""
    defects: tuple[Defect, ...]

    @property
    def is_valid(self) -> bool:
        return not self.defects


def scan_checkpoint(name: str, files: FileAccess) -> ScanResult:
    """Scan the checkpoint called `name`: every hash, every header, every tensor.

    Returns:
        All defects, by file; an unreadable file is a defect, not an exception.
    """
    try:
        content = files.read(MANIFEST_FILE)
        if content is None:
            raise WanmaError("is missing: the checkpoint was never committed")
        manifest = parse_manifest(content)
    except (OSError, WanmaError) as error:
        return ScanResult(
            name, None, (Defect(MANIFEST_FILE, _cause_text(error).removeprefix(f"{MANIFEST_FILE} ")),)
        )
    problems = [Defect(MANIFEST_FILE, cause) for cause in _find_manifest_errors(name, manifest)]
    tensors_by_file: defaultdict[str, dict[str, tuple[str, tuple[int, ...]]]] = defaultdict(dict)
    for tensor, entry in manifest.tensors.items():
        for shard in entry.shards:
            tensors_by_file[shard.file][tensor] = entry.dtype, shard.box.shape
        for change in entry.changes:
            expected = tensors_by_file[change.file]
            expected[tensor + CHANGED_ROWS] = "I64", (change.count,)
            expected[tensor + CHANGED_VALUES] = entry.dtype, (change.count, *entry.shape[1:])
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as threads:
        defects_by_file = threads.map(
            lambda file: list(_find_file_defects(files, file, manifest.files[file], tensors_by_file[file])),
            sorted(manifest.files),
        )
        problems += [problem for defects in defects_by_file for problem in defects]
    return ScanResult(name, manifest, tuple(problems))


def find_size_mismatch(size_of: Callable[[str], int | None], manifest: Manifest) -> str | None:
    """Return the first file that is missing or has another size; None: all sizes match."""
    for name, entry in manifest.files.items():
        if (cause := _size_mismatch(size_of(name), entry)) is not None:
            return f"{name} {cause}"
    return None


def find_coverage_error(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Return the reason why boxes do not cover a tensor of `shape` exactly once; None if they do."""
    elements, full = sum(box.numel for box in boxes), math.prod(shape)
    if full == 0:
        return None
    parts = [box for box in boxes if box.numel]
    # Along the dimension with the most cuts, each box has few others to compare.
    dims = range(len(shape))
    cut_dim = max(dims, key=lambda dim: len({box.offset[dim] for box in parts}), default=None)
    ordered = parts if cut_dim is None else sorted(parts, key=lambda box: box.offset[cut_dim])
    for number, box in enumerate(ordered):
        for later_box in ordered[number + 1 :]:
            if cut_dim is not None and later_box.offset[cut_dim] >= box.offset[cut_dim] + box.shape[cut_dim]:
                break
            if intersect_boxes(box, later_box) is not None:
                return f"shards at {box.offset} and {later_box.offset} overlap"
    return None if elements == full else f"its shards cover {elements:,} of {full:,} elements"


def _find_manifest_errors(name: str, manifest: Manifest) -> Iterator[str]:
    if name.startswith("step-") and not name.startswith(step_folder_name(manifest.step)):
        yield f"is of step {manifest.step:,}, which differs from the step in the name of its folder"
    for tensor, entry in manifest.tensors.items():
        if (cause := find_coverage_error(entry.shape, [shard.box for shard in entry.shards])) is not None:
            yield f"tensor {tensor}: {cause}"
        for file, count in Counter(shard.file for shard in entry.shards).items():
            if count > 1:
                yield f"tensor {tensor}: {count} shards with this name in {file}"


def _find_file_defects(
    files: FileAccess, name: str, entry: FileEntry, expected_tensors: dict[str, tuple[str, tuple[int, ...]]]
) -> Iterator[Defect]:
    """Yield the defects of one data file, which is read once."""
    try:
        if (cause := _size_mismatch(files.size(name), entry)) is not None:
            yield Defect(name, cause)
            return
        digest = hashlib.sha256()
        with files.open(name) as file:
            head = file.read(8)
            length = int.from_bytes(head, "little")
            if len(head) == 8 and length <= min(MAX_HEADER_BYTES, entry.bytes - 8):
                head += file.read(length)
            digest.update(head)
            while block := file.read(_READ_BYTES):
                digest.update(block)
    except Exception as error:  # a storage library may raise anything
        yield Defect(name, f"cannot be read: {_cause_text(error)}")
        return
    if digest.hexdigest() != entry.sha256:
        yield Defect(name, "is damaged: its content differs from its SHA-256")
    try:
        regions = parse_header(head, entry.bytes)
    except ValueError as error:
        yield Defect(name, str(error))
        return
    for tensor, kind in expected_tensors.items():
        region = regions.get(tensor)
        if region is None:
            yield Defect(name, f"tensor {tensor} is missing in it")
        elif (region.dtype, region.shape) != kind:
            yield Defect(
                name,
                f"tensor {tensor} is {region.dtype} {region.shape}, but {kind[0]} {kind[1]} in the manifest",
            )
    for tensor in [] if is_base_file(name) else sorted(set(regions).difference(expected_tensors)):
        yield Defect(name, f"tensor {tensor} is in it, but not in the manifest")


def _size_mismatch(size: int | None, entry: FileEntry) -> str | None:
    if size is None:
        return "is missing"
    return None if size == entry.bytes else f"has {size:,} bytes instead of {entry.bytes:,}"


def _cause_text(error: Exception) -> str:
    if isinstance(error, WanmaError):
        return error.message
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
