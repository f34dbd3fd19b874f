"""Loading: each rank fills the tensors it has, whatever layout they were saved from.

    path = newest(folder, print)             # on rank 0, which sends it to the others
    state, rank_state = load(path, tensors)  # every rank, into its own layout

    load(source, tensors)                    # the same from an in-memory checkpoint

Files are mapped and only what a rank needs is read. Loading trusts the hashes that `newest` or
`find_defects` has checked; it checks that every tensor it reads exists with the listed dtype and shape.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wanma.checkpoint.format.local_shards import DTYPES, dtype_name, local_box, local_tensor
from wanma.checkpoint.format.manifest import (
    CHANGED_ROWS,
    CHANGED_VALUES,
    Box,
    FileRegion,
    Manifest,
    TensorEntry,
    intersect_boxes,
    parse_header,
)
from wanma.checkpoint.format.memory_map import map_private
from wanma.checkpoint.load.verification import find_defects, find_newest_valid, read_training_state
from wanma.checkpoint.store.checkpoint_folder import read_manifest
from wanma.job.errors import WanmaError, did_you_mean, first_lines

__all__ = [
    "CheckpointReader",
    "CheckpointSource",
    "find_defects",
    "find_newest_valid",
    "load_full_tensors",
    "load_tensors",
    "open_disk_source",
    "read_training_state",
]

_MAX_SHOWN = 5


@dataclass(frozen=True)
class CheckpointSource:
    """Source that a state can be loaded from: a checkpoint on disk or in memory."""

    name: str
    """Name in messages."""
    manifest: Manifest
    map_file: Callable[[str], memoryview]
    """Function from a data file's name to its content.

    The memory is writable for torch's sake, which does not write. Raises OSError or ValueError.
    """


def open_disk_source(path: Path) -> CheckpointSource:
    """Return the checkpoint at `path` as a source.

    Raises:
        WanmaError: its manifest is missing or damaged.
    """
    try:
        manifest = read_manifest(path)
    except WanmaError as error:
        raise WanmaError(
            f"checkpoint {path}: {error.message}", error.hint or "load an older checkpoint"
        ) from error
    return CheckpointSource(f"checkpoint {path}", manifest, lambda file: _map_file(path / file))


def load_tensors(
    source: Path | CheckpointSource,
    tensors: Mapping[str, torch.Tensor],
    *,
    strict: bool = True,
    allow_cast: bool = False,
    rounded_names: Collection[str] = (),
    names_on_other_ranks: Collection[str] = (),
    extended_names: Collection[str] = (),
    rank: int = 0,
    world_size: int = 1,
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Fill `tensors` in place.

    Args:
        source: a checkpoint's path, the same on all ranks, or an in-memory checkpoint.
        tensors: full name -> tensor or DTensor of any layout; dtype and full shape must be as saved.
        strict: if True, tensors of the checkpoint without a counterpart here are an error.
        allow_cast: if True, floating-point tensors may have been saved in another floating-point dtype.
        rounded_names: names of tensors that may have been saved in fp32.
        names_on_other_ranks: names that only other ranks hold (of other pipeline stages).
        extended_names: names of tensors that may have more rows than were saved; the further ones are left
            as they are.
        rank: rank of the loading run, for its `rank_state`.
        world_size: world size of the loading run, for its `rank_state`.

    Returns:
        The state, and this rank's own saved state if the world has the same size (else None).

    Raises:
        WanmaError: the checkpoint is from another model, or damaged. Tensors are untouched in the
            first case.
    """
    source = source if isinstance(source, CheckpointSource) else open_disk_source(source)
    manifest = source.manifest
    _require_same_model(
        source, tensors, strict, allow_cast, rounded_names, names_on_other_ranks, extended_names
    )
    files = _MappedFiles(source)
    for name, tensor in tensors.items():
        box, entry = local_box(name, tensor), manifest.tensors[name]
        if box is None:
            continue
        local = local_tensor(tensor)
        if name in extended_names and entry.shape != tuple(tensor.shape):
            rows = min(max(entry.shape[0] - box.offset[0], 0), box.shape[0])
            box, local = Box(box.offset, (rows, *box.shape[1:])), local[:rows]
        _fill(local, box, name, entry, files)
    has_same_world_size = world_size == manifest.world_size
    return manifest.state, manifest.rank_state.get(rank) if has_same_world_size else None


def load_full_tensors(path: Path, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """Load full tensors onto the CPU, in one process; all of them or those named.

    Raises:
        WanmaError: the checkpoint lacks a name, or is damaged.
    """
    reader = CheckpointReader(path)
    return {name: reader.read(name) for name in (reader.tensors if names is None else names)}


class CheckpointReader:
    """Reader of a checkpoint's tensors, one at a time or in parts; in one process, onto the CPU.

    Args:
        source: its path, or an in-memory checkpoint.

    Raises:
        WanmaError: the checkpoint is damaged.
    """

    def __init__(self, source: Path | CheckpointSource) -> None:
        source = source if isinstance(source, CheckpointSource) else open_disk_source(source)
        self.name = source.name
        self.tensors: Mapping[str, TensorEntry] = source.manifest.tensors
        self._files = _MappedFiles(source)

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Read one tensor, or a box of it.

        Raises:
            WanmaError: no tensor has that name, or the file is damaged.
        """
        entry = self.tensors.get(name)
        if entry is None:
            raise WanmaError(
                f"{self.name} has no tensor {name}.{did_you_mean(name, self.tensors)}",
                f"see its manifest for the names of its {len(self.tensors)} tensors",
            )
        box = box or Box((0,) * len(entry.shape), entry.shape)
        part = torch.empty(box.shape, dtype=DTYPES[entry.dtype])
        _fill(part, box, name, entry, self._files)
        return part


def _fill(local: torch.Tensor, box: Box, name: str, entry: TensorEntry, files: _MappedFiles) -> None:
    """Copy into `local`, which holds `box` of the tensor, from every saved box that intersects it.

    Then rows that have changed since are copied over them.
    """
    copied_elements = 0
    with torch.no_grad():
        for shard in entry.shards:
            if (intersection := intersect_boxes(box, shard.box)) is not None:
                target_slices, source_slices = intersection
                part = local[target_slices]
                part.copy_(files.shard(shard.file, name, entry.dtype, shard.box.shape)[source_slices])
                copied_elements += part.numel()
        for change in entry.changes:
            numbers = files.shard(change.file, name + CHANGED_ROWS, "I64", (change.count,))
            values = files.shard(
                change.file, name + CHANGED_VALUES, entry.dtype, (change.count, *entry.shape[1:])
            )
            positions = numbers - box.offset[0]
            is_here = (positions >= 0) & (positions < box.shape[0])
            columns = [
                slice(start, start + size) for start, size in zip(box.offset[1:], box.shape[1:], strict=True)
            ]
            changed = values[is_here][(slice(None), *columns)]
            local[positions[is_here].to(local.device)] = changed.to(local)
    if copied_elements != box.numel:
        raise WanmaError(
            f"{files.source.name}: tensor {name}: its shards cover {copied_elements:,} of the {box.numel:,} "
            "elements "
            "needed",
            "load an older checkpoint: this one is damaged",
        )


class _MappedFiles:
    """Data files of a source, mapped into memory when first needed."""

    def __init__(self, source: CheckpointSource) -> None:
        self.source = source
        self._open: dict[str, tuple[memoryview, dict[str, FileRegion]]] = {}

    def shard(self, file: str, name: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the shard of tensor `name` in `file`, as a view of the mapped file."""
        if file not in self._open:
            self._open[file] = self._map(file)
        memory, regions = self._open[file]
        region = regions.get(name)
        if region is None or (region.dtype, region.shape) != (dtype, shape):
            raise WanmaError(
                f"{self.source.name}: {file} does not contain tensor {name} with the dtype and shape of the "
                "manifest",
                "load an older checkpoint: this one is damaged",
            )
        elements = (region.stop - region.start) // DTYPES[dtype].itemsize
        return torch.frombuffer(memory, dtype=DTYPES[dtype], count=elements, offset=region.start).view(shape)

    def _map(self, file: str) -> tuple[memoryview, dict[str, FileRegion]]:
        try:
            memory, expected = self.source.map_file(file), self.source.manifest.files[file].bytes
            if len(memory) != expected:
                raise ValueError(f"it has {len(memory):,} bytes instead of {expected:,}")
            return memory, parse_header(memory, len(memory))
        except (OSError, ValueError) as error:
            raise WanmaError(
                f"{self.source.name}: {file} cannot be read: {error}",
                "load an older checkpoint: this one is damaged",
            ) from error


def _map_file(path: Path) -> memoryview:
    with path.open("rb") as file:
        return map_private(file.fileno())


def _require_same_model(
    source: CheckpointSource,
    tensors: Mapping[str, torch.Tensor],
    strict: bool,
    allow_cast: bool,
    rounded_names: Collection[str],
    names_on_other_ranks: Collection[str],
    extended_names: Collection[str],
) -> None:
    """Compare names, shapes and dtypes before anything is changed; one error with the first differences."""
    manifest = source.manifest
    differences: list[str] = []
    for name, tensor in tensors.items():
        entry = manifest.tensors.get(name)
        own_type = (dtype_name(name, tensor), tuple(tensor.shape))
        if entry is None:
            close = did_you_mean(name, manifest.tensors) if len(differences) < _MAX_SHOWN else ""
            differences.append(f"{name}: not in the checkpoint.{close}")
        elif entry.shape != own_type[1] and not (
            name in extended_names and entry.shape[1:] == own_type[1][1:] and entry.shape[0] < own_type[1][0]
        ):
            differences.append(f"{name}: shape {own_type[1]} here, {entry.shape} in the checkpoint")
        elif (
            entry.dtype != own_type[0]
            and not (name in rounded_names and entry.dtype == "F32")
            and not (allow_cast and tensor.is_floating_point() and _is_floating(entry))
        ):
            differences.append(f"{name}: dtype {own_type[0]} here, {entry.dtype} in the checkpoint")
    if strict:
        extra = set(manifest.tensors).difference(tensors, names_on_other_ranks)
        differences += [f"{name}: only in the checkpoint" for name in sorted(extra)]
    if differences:
        problem, hint = _classify_differences(differences)
        raise WanmaError(
            f"{source.name} {problem}; first differences:\n    {first_lines(differences, _MAX_SHOWN)}", hint
        )


def _classify_differences(differences: list[str]) -> tuple[str, str]:
    """Classify the differences: return what the checkpoint is, and the way out."""
    new_run_hint = "or start a new run from its weights (checkpoint.start_from, --run-dir DIR)"
    if all(text.startswith("optimizer.") for text in differences):
        return "has the state of another optimizer", f"use the optimizer that was saved, {new_run_hint}"
    if all(": dtype " in text for text in differences):
        return "has other dtypes", f"use the precision that was saved, {new_run_hint}"
    return (
        "is from another model",
        "use the model that was saved, or start a new run in another run directory (--run-dir DIR)",
    )


def _is_floating(entry: TensorEntry) -> bool:
    return DTYPES[entry.dtype].is_floating_point
