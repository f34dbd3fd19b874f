"""Rows of embedding tables that lie in a file on disk, and are in the device's memory while they are in use.

The device is a CPU or a GPU; the kernel keeps pages of the file in host memory that is free. A record is a
row with its optimizer state, one contiguous piece of the file. The records of a step are read while the step
before it runs; records that have changed are written back when others take their place. Threads use a GPU's
default stream, as the step does, so that their copies and its kernels are in order. The file has no name and
ends with the process: a run that was killed goes on from its checkpoint.
"""

from __future__ import annotations

import mmap
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from wanma.job.errors import JobError, WanmaError
from wanma.observe.units import bytes_text
from wanma.parallel.memory.disk_pool import DiskPool
from wanma.planner.embedding_placement import ROW_ADDRESS_BYTES, cached_row_count

_TRANSFER_THREADS = 8
"""Threads that move records at once: a page that is not in memory makes a thread wait for the disk."""
_RECORDS_PER_TRANSFER = 128
_RECORDS_PER_WRITE = 1 << 14
"""Records that `write_back` copies at once."""
_MAX_USES = 7
"""Uses of a record that count; each spares it one turn of the clock."""
_SCANNED_SLOTS = 1024
"""Fewest slots that a search for unused ones looks at."""
_FAULT_BYTES = 64 << 10
"""Bytes that the kernel makes resident for a row that is read, if they are in its memory."""
_MAX_RESIDENT_BYTES = 64 << 20
"""Resident bytes of the file, at most, that `vectors` leaves to the process."""


@dataclass(frozen=True)
class RecordLayout:
    """Columns of a record: a row, then its states."""

    width: int
    """Elements of a row."""
    states: tuple[str, ...]
    """States with as many elements as a row."""
    row_states: tuple[str, ...]
    """States of one element."""

    @property
    def columns(self) -> int:
        return self.width * (1 + len(self.states)) + len(self.row_states)

    def split(self, records: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return rows (records, width) and states, (records, width) or (records,), in the same memory."""
        width = self.width
        states: dict[str, Tensor] = {}
        for number, name in enumerate(self.states, start=1):
            states[name] = records[:, number * width : (number + 1) * width]
        for number, name in enumerate(self.row_states, start=self.columns - len(self.row_states)):
            states[name] = records[:, number]
        return records[:, :width], states


class RowCounts(NamedTuple):
    """Rows of steps, added up over steps."""

    used: int
    in_memory: int
    """Number of them that were in memory before they were prefetched."""


class RowCache:
    """Rows of one rank: all on disk, some in the memory of its device.

    A slot is the place of one record in that memory. Slots are given away by a clock with counts of uses
    (GCLOCK, Smith 1978): a record whose count is zero when the hand comes is replaced. What a run computes
    does not depend on which records are in memory. One thread calls the methods.

    Args:
        row_count: rows of the rank.
        layout: columns of a record.
        dtype: of all of them.
        memory_bytes: memory for records and their addresses.
        disk_pool: provider of the file.
        rank: rank in messages.
        device: device of the rank.

    Raises:
        JobError: the memory holds no row.
        WanmaError: the disk is full, or the folder cannot be written to.
    """

    def __init__(
        self,
        row_count: int,
        layout: RecordLayout,
        dtype: torch.dtype,
        memory_bytes: int,
        disk_pool: DiskPool,
        rank: int,
        device: torch.device,
    ) -> None:
        columns = layout.columns
        self._rank, self._record_bytes = rank, columns * dtype.itemsize
        self._device = device
        slots = cached_row_count(memory_bytes, row_count, self._record_bytes)
        if slots == 0 and row_count > 0:
            raise JobError(
                f"rank {rank}: parallel.embedding_memory_bytes leaves {bytes_text(memory_bytes)} for "
                f"{row_count:,} rows of embedding tables, whose addresses alone take "
                f"{bytes_text(row_count * ROW_ADDRESS_BYTES)}",
                "raise parallel.embedding_memory_bytes to hold the rows of a step too, or use more ranks",
            )
        self._mapping: mmap.mmap | None = None
        self._stored = torch.empty(0, columns, dtype=dtype)
        """Records of all rows as the file has them, (rows, columns)."""
        if row_count > 0:
            self._mapping = self._map_file(row_count, disk_pool)
            flat = torch.frombuffer(self._mapping, dtype=dtype, count=row_count * columns)
            self._stored = flat.view(row_count, columns)
        self._records = torch.empty(slots, columns, dtype=dtype, device=device)
        """Records in memory, (slots, columns); those without a row have no values."""
        self.matrix, self.states = layout.split(self._records)
        """Rows in memory, (slots, width), and their states by name."""
        self.stored_matrix, self.stored_states = layout.split(self._stored)
        """All rows, (rows, width), and their states by name; `write_back` makes them current."""
        self.prefetched_step: int | None = None
        """Step of the last `prefetch`."""
        self._slot_of = torch.full((row_count,), -1, dtype=torch.int32)
        self._row_of = torch.full((slots,), -1, dtype=torch.int64)
        self._last_use = torch.full((slots,), -1, dtype=torch.int32)
        """Number of the request that used each slot last; -1 for none."""
        self._uses = torch.zeros(slots, dtype=torch.uint8)
        self._is_dirty = torch.zeros(slots, dtype=torch.bool)
        """True where the record has changed since it was read."""
        self._is_ready = torch.ones(slots, dtype=torch.bool)
        """False where the record is still being read."""
        self._hand, self._request = 0, 0
        self._counts = RowCounts(0, 0)
        self._transfer: Future[None] | None = None
        self._filled = self._row_of.new_empty(0)
        """Slots that the transfer fills."""
        self._deferred = self._row_of.new_empty(0)
        """Requested rows for which there were no slots yet."""
        self._resident_bytes = 0
        """Resident bytes of the file that `vectors` has read, at most."""

    # ------------------------------------------------------------------ steps

    def prefetch(self, step: int, rows: Tensor) -> None:
        """Start to read the rows of the next step that are not in memory; those of this step stay.

        Args:
            step: number of the next step.
            rows: its rows, each once and in order, (rows,) int64.
        """
        self._wait()
        self.prefetched_step = step
        rows = rows.cpu()
        in_memory = int((self._slot_of[rows] >= 0).sum())
        self._counts = RowCounts(self._counts.used + len(rows), self._counts.in_memory + in_memory)
        earlier, self._request = self._request, self._request + 1
        self._deferred = self._admit(rows, earlier)

    def begin_step(self) -> None:
        """Wait for the rows of the last `prefetch`; those of the step before it may go.

        Raises:
            WanmaError: memory does not hold them all.
        """
        self._wait()
        self._require_room(self._admit(self._deferred, self._request))
        self._wait()
        self._deferred = self._row_of.new_empty(0)

    def vectors(self, rows: Tensor) -> Tensor:
        """Return a copy of rows, (rows, width); from the file those that are not in memory."""
        rows = rows.cpu()
        slots = self._slot_of[rows].long()
        is_stored = slots < 0
        if not bool(is_stored.any()):
            if not bool(self._is_ready[slots].all()):
                self._wait()
            return self.matrix[slots.to(self._device)]
        self._wait()  # for rows on their way to memory, and for those on their way to the file
        vectors = self.matrix.new_empty(len(rows), self.matrix.shape[1])
        vectors[(~is_stored).to(self._device)] = self.matrix[slots[~is_stored].to(self._device)]
        vectors[is_stored.to(self._device)] = self.stored_matrix[rows[is_stored]].to(self._device)
        self._resident_bytes += int(is_stored.sum()) * max(self._record_bytes, _FAULT_BYTES)
        if self._resident_bytes > _MAX_RESIDENT_BYTES:
            assert self._mapping is not None
            self._mapping.madvise(mmap.MADV_DONTNEED)
            self._resident_bytes = 0
        return vectors

    def slots_to_change(self, rows: Tensor) -> Tensor:
        """Return the slots of rows that the caller changes next, (rows,) int64.

        Args:
            rows: rows, each once, (rows,) int64. Usually `begin_step` has brought them into memory.

        Raises:
            WanmaError: memory does not hold them all.
        """
        rows = rows.cpu()
        slots = self._slot_of[rows].long()
        if bool((slots < 0).any()) or not bool(self._is_ready[slots].all()):
            self._wait()
            self._request += 1
            self._require_room(self._admit(rows, self._request))
            self._wait()
            slots = self._slot_of[rows].long()
        self._is_dirty[slots] = True
        return slots.to(self._device)

    def pop_counts(self) -> RowCounts:
        """Return the counts since the last call."""
        counts, self._counts = self._counts, RowCounts(0, 0)
        return counts

    @torch.no_grad()
    def write_back(self) -> None:
        """Write all records that have changed to the file, which other code is about to read or fill.

        A caller that fills it does so before the first step.
        """
        self._wait()
        if self._mapping is None:
            return
        self._mapping.madvise(mmap.MADV_NORMAL)
        dirty = self._is_dirty.nonzero()[:, 0]
        dirty = dirty[self._row_of[dirty].argsort()]
        for slots in dirty.split(_RECORDS_PER_WRITE):
            self._write(self._row_of[slots], self._read_slots(slots))
        self._is_dirty.zero_()

    # ------------------------------------------------------------------ slots

    def _admit(self, rows: Tensor, first_kept: int) -> Tensor:
        """Give slots to rows and start to fill them; return the rows that got none.

        Args:
            rows: rows, each once.
            first_kept: number of the first request whose slots are kept.
        """
        slots = self._slot_of[rows].long()
        is_missing = slots < 0
        known, missing = slots[~is_missing], rows[is_missing]
        self._last_use[known] = self._request
        self._uses[known] = (self._uses[known] + 1).clamp_(max=_MAX_USES)
        slots = self._take_slots(len(missing), first_kept)
        admitted = missing[: len(slots)]
        if len(slots):
            replaced, is_dirty = self._row_of[slots], self._is_dirty[slots]
            self._slot_of[replaced[replaced >= 0]] = -1
            self._slot_of[admitted] = slots.int()
            self._row_of[slots] = admitted
            self._is_dirty[slots] = self._is_ready[slots] = False
            self._filled = slots
            thread = ThreadPoolExecutor(1, thread_name_prefix="wanma-rows")
            self._transfer = thread.submit(self._move, replaced[is_dirty], slots[is_dirty], admitted, slots)
            thread.shutdown(wait=False)  # it ends with the transfer
        return missing[len(slots) :]

    def _take_slots(self, count: int, first_kept: int) -> Tensor:
        """Turn the clock until it has found `count` slots, or as many as can be given away."""
        slots = len(self._row_of)
        found = [self._row_of.new_empty(0)]
        remaining_scan = (_MAX_USES + 2) * slots  # then each slot that may go has come up with no use left
        while count > 0 and remaining_scan > 0:
            start = self._hand
            stop = min(start + max(2 * count, _SCANNED_SLOTS), slots)
            may_go = self._last_use[start:stop] < first_kept
            chosen = (may_go & (self._uses[start:stop] == 0)).nonzero()[:count, 0]
            if len(chosen) == count:
                stop = start + int(chosen[-1]) + 1
            uses = self._uses[start:stop]
            uses -= (may_go[: stop - start] & (uses > 0)).to(uses.dtype)
            self._last_use[start + chosen] = self._request
            found.append(start + chosen)
            count -= len(chosen)
            remaining_scan -= stop - start
            self._hand = stop % slots
        return torch.cat(found)

    def _require_room(self, excess: Tensor) -> None:
        """Raise an error if rows of a step have found no slot."""
        if not len(excess):
            return
        slots = len(self._row_of)
        raise WanmaError(
            f"rank {self._rank}: parallel.embedding_memory_bytes has room for {slots:,} rows with their "
            f"optimizer state, and a step uses {len(excess):,} rows more",
            f"raise parallel.embedding_memory_bytes by {bytes_text(2 * len(excess) * self._record_bytes)} or "
            "more, reduce train.global_batch, or use more ranks",
        )

    # ------------------------------------------------------------------ transfers

    def _wait(self) -> None:
        """Wait until no record is on its way."""
        if self._transfer is not None:
            transfer, self._transfer = self._transfer, None
            transfer.result()
            self._is_ready[self._filled] = True

    @torch.no_grad()
    def _move(self, old_rows: Tensor, old_slots: Tensor, rows: Tensor, slots: Tensor) -> None:
        """Write records of slots to the file, and read others in their place; in a thread.

        The slots are those of no step that runs.
        """
        assert self._mapping is not None
        self._mapping.madvise(mmap.MADV_RANDOM)  # else the kernel reads the neighbours of each page
        old_records = self._read_slots(old_slots)
        size = _RECORDS_PER_TRANSFER
        with ThreadPoolExecutor(_TRANSFER_THREADS, thread_name_prefix="wanma-rows") as threads:
            writes = threads.map(self._write, old_rows.split(size), old_records.split(size))
            reads = threads.map(self._read, rows.split(size), slots.split(size))
            list(writes)  # raises their errors
            list(reads)
        self._mapping.madvise(mmap.MADV_DONTNEED)  # its pages are the kernel's to keep

    def _read_slots(self, slots: Tensor) -> Tensor:
        """Return a copy of records in host memory, (slots, columns)."""
        return self._records.index_select(0, slots.to(self._device)).cpu()

    @torch.no_grad()
    def _write(self, rows: Tensor, records: Tensor) -> None:
        self._stored.index_copy_(0, rows, records)

    @torch.no_grad()
    def _read(self, rows: Tensor, slots: Tensor) -> None:
        records = self._stored.index_select(0, rows)
        self._records.index_copy_(0, slots.to(self._device), records.to(self._device))

    def _map_file(self, row_count: int, disk_pool: DiskPool) -> mmap.mmap:
        try:
            return disk_pool.map_file(row_count * self._record_bytes)
        except WanmaError as error:
            raise WanmaError(
                f"rank {self._rank}: parallel.embedding_memory_bytes puts {row_count:,} rows of embedding "
                f"tables on disk: {error.message}",
                "free space, set cluster.scratch to a folder on another disk, or use more nodes",
            ) from error
