"""Host buffer of one rank's data file in its final form: header, then data.

A save is then one copy per tensor, straight to its final place, and one sequential write. The
memory is kept between saves and grows at most once per change of the model; for CUDA it is pinned.
Tensors in host memory that stay as they are need no copy: the file is written from them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

import torch

from wanma.checkpoint.format.local_shards import (
    DTYPES,
    LocalShard,
    assign_writers,
    local_shards,
    local_tensor,
    shard_layout_key,
)
from wanma.checkpoint.format.manifest import CHANGED_ROWS, CHANGED_VALUES, build_header
from wanma.checkpoint.format.tensor_blocks import iterate_blocks
from wanma.job.errors import WanmaError

_RELEASE_INTERVAL_BYTES = 64 << 20
"""Bytes of pages that a copy reads and writes, from which on it releases them."""
_GATHER_ELEMENTS, _PAGE_BYTES = 1 << 20, 4096
"""Elements of single rows that are copied at once, each row of which may lie on a page of its own."""


class BufferAllocator(Protocol):
    """Provider of memory outside the process's own, such as mapped files."""

    def allocate(self, size: int) -> torch.Tensor:
        """Return uninitialized memory, (size,) uint8."""

    def release_pages(self) -> None:
        """Release the process's memory behind it; called from time to time while much is copied."""


class FileBuffer:
    """Host buffer of one rank.

    Args:
        rank: this rank.
        replicas: ranks that hold the same plain (not DTensor) tensors under the same names.
        allocator: memory for the copy; None: host memory.
        writer_ranks: ranks that divide the writing of their common shards; None: all. Other ranks write them
            again.
    """

    def __init__(
        self,
        rank: int,
        replicas: Sequence[int],
        allocator: BufferAllocator | None = None,
        writer_ranks: Collection[int] | None = None,
    ) -> None:
        self._allocator = allocator
        self._writer_ranks = writer_ranks
        self._rank = rank
        self._replicas = tuple(replicas)
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._layout: tuple[object, ...] | None = None
        self._views: dict[str, torch.Tensor] = {}
        self.shards: list[LocalShard] = []
        """Shards that this rank writes, of the tensors last copied."""
        self.content = memoryview(b"")
        """Content of the file, of the tensors last copied; empty when this rank writes nothing."""
        self._changed_rows: dict[str, torch.Tensor] = {}
        """By name in the file the rows of a tensor that `copy` takes, (rows,) int64."""
        self.changed_counts: dict[str, int] = {}
        """Number of changed rows by tensor, of tensors of which only these were copied."""
        self._references: list[memoryview] | None = None
        """Header and memory of the tensors last referred to; None: the last ones were copied."""

    def copy(
        self,
        tensors: Mapping[str, torch.Tensor],
        changed_rows: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        """Copy this rank's share of `tensors`; they may change as soon as this returns.

        Args:
            tensors: full name -> tensor or DTensor.
            changed_rows: by name of a tensor of which rows alone are copied, whether each row that this rank
                holds is, (local rows,) bool.

        Raises:
            WanmaError: a tensor cannot be saved, or there is no memory for the copy.
        """
        devices = set()
        copied_bytes = 0
        self._references = None
        with torch.no_grad():
            for name, (view, local) in self.copy_targets(tensors, changed_rows).items():
                devices.add(local.device)
                rows = self._changed_rows.get(name)
                row_bytes = local.stride(0) * local.itemsize if local.ndim else 0
                blocks = iterate_blocks(tuple(view.shape))
                if rows is not None:
                    row_bytes = max(row_bytes, _PAGE_BYTES)
                    blocks = iterate_blocks(tuple(view.shape), max_elements=_GATHER_ELEMENTS)
                for block in blocks:
                    part = view[block.slices]
                    if rows is None:
                        part.copy_(local[block.slices], non_blocking=True)
                    else:
                        first, *others = block.slices
                        part.copy_(local[rows[first]][(slice(None), *others)], non_blocking=True)
                    copied_bytes += part.nbytes + (len(part) * row_bytes if part.ndim else 0)
                    if copied_bytes >= _RELEASE_INTERVAL_BYTES:
                        self.release_pages()
                        copied_bytes = 0
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def release_pages(self) -> None:
        """Release the memory behind the allocator's files, if there is one."""
        if self._allocator is not None:
            self._allocator.release_pages()

    def refer_to(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Make this rank's share of `tensors` the content of the file, without a copy.

        They must not change until the file is written.

        Args:
            tensors: full name -> tensor or DTensor.

        Returns:
            False, and nothing is done, where a copy is needed: some are on a device, or not contiguous.

        Raises:
            WanmaError: a tensor cannot be saved.
        """
        shards = self._shards_to_write(tensors)
        sources = {piece.name: local_tensor(tensors[piece.name]) for piece in shards}
        if self._allocator is not None or not all(
            source.device.type == "cpu" and source.is_contiguous() for source in sources.values()
        ):
            return False
        header, regions = build_header({piece.name: (piece.dtype, piece.box.shape) for piece in shards})
        self.shards, self.changed_counts, self._layout = shards, {}, None
        data = [sources[name].reshape(-1).view(torch.uint8).numpy().data for name in regions]
        self._references = [memoryview(header), *data] if regions else []
        return True

    @property
    def parts(self) -> list[memoryview]:
        """Content of the file, part by part, of the tensors last copied or referred to."""
        if self._references is not None:
            return self._references
        return [self.content] if self.content else []

    def copy_targets(
        self,
        tensors: Mapping[str, torch.Tensor],
        changed_rows: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return, by name, (view of the file's data, local tensor to copy there) of this rank's share.

        Arguments are those of `copy`; a tensor of which rows alone are copied is returned with all its rows.
        Views are in the file's order, without gaps, behind the header, which is already written.

        Raises:
            WanmaError: a tensor cannot be saved, or there is no memory for the copy.
        """
        rows = {name: is_changed.nonzero()[:, 0] for name, is_changed in changed_rows.items()}
        layout = *shard_layout_key(tensors), *((name, len(numbers)) for name, numbers in rows.items())
        if layout != self._layout:
            self._layout = None  # until the new one is complete
            self._plan_file(tensors, {name: len(numbers) for name, numbers in rows.items()})
            self._layout = layout
        sources, self._changed_rows = {}, {}
        for piece in self.shards:
            local = local_tensor(tensors[piece.name])
            if piece.name in rows:
                sources[piece.name + CHANGED_ROWS] = rows[piece.name] + piece.box.offset[0]
                sources[piece.name + CHANGED_VALUES] = local
                self._changed_rows[piece.name + CHANGED_VALUES] = rows[piece.name]
            else:
                sources[piece.name] = local
        return {name: (view, sources[name]) for name, view in self._views.items()}

    def shard_bytes(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Return the bytes of this rank's share of `tensors`, without the header."""
        return sum(piece.bytes for piece in self._shards_to_write(tensors))

    def _shards_to_write(self, tensors: Mapping[str, torch.Tensor]) -> list[LocalShard]:
        pieces = local_shards(tensors, self._replicas)
        if self._writer_ranks is not None:
            pieces = [
                replace(piece, replicas=tuple(rank for rank in piece.replicas if rank in self._writer_ranks))
                for piece in pieces
            ]
        return assign_writers(pieces, self._rank)

    def _plan_file(self, tensors: Mapping[str, torch.Tensor], changed_counts: Mapping[str, int]) -> None:
        """Lay out the file for these tensors, of some of them for changed rows, and allocate its memory."""
        self.shards = self._shards_to_write(tensors)
        self.changed_counts = {
            piece.name: changed_counts[piece.name] for piece in self.shards if piece.name in changed_counts
        }
        contents: dict[str, tuple[str, tuple[int, ...]]] = {}
        for piece in self.shards:
            count = self.changed_counts.get(piece.name)
            if count is None:
                contents[piece.name] = piece.dtype, piece.box.shape
            elif count:
                contents[piece.name + CHANGED_ROWS] = "I64", (count,)
                contents[piece.name + CHANGED_VALUES] = piece.dtype, (count, *piece.box.shape[1:])
        header, regions = build_header(contents)
        size = max((region.stop for region in regions.values()), default=0)
        pinned = self._allocator is None and any(tensor.is_cuda for tensor in tensors.values())
        self._views, self.content = {}, memoryview(b"")
        if size > self._memory.numel() or (self._allocator is None and pinned != self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old before asking for the new
            try:
                if self._allocator is not None:
                    self._memory = self._allocator.allocate(size)
                else:
                    self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            except WanmaError as error:
                raise WanmaError(
                    f"no space for the checkpoint shard of rank {self._rank}, {size:,} bytes: "
                    f"{error.message}",
                    error.hint,
                ) from error
            except (RuntimeError, OSError) as error:
                raise WanmaError(
                    f"no host memory for the checkpoint shard of rank {self._rank}, {size:,} bytes: {error}",
                    "use more ranks, or shard the optimizer state (parallel.shard)",
                ) from error
        if not regions:
            return
        self.content = memoryview(self._memory[:size].numpy().data)
        self.content[: len(header)] = header
        for name, region in regions.items():
            data = self._memory[region.start : region.stop]
            self._views[name] = data.view(DTYPES[region.dtype]).view(region.shape)
