"""In-memory checkpoints: copies of the training state that outlive the ranks, written beside computation.

    checkpointer = InMemoryCheckpointer(memory_files, rank, world_size, generation, ...)
    checkpointer.start(step, tensors, state)    # returns at once; a thread copies
    ...                                         # forward and backward of the next step
    checkpointer.wait_for_copy()                # before any of the given tensors changes
    checkpoint, problems = find_local_checkpoint(memory_files, step, ...)  # next generation: a share each
    source = checkpoint.open_source()           # if no rank has found a problem

A rank's shard has the content of its file in a checkpoint (`file_buffer`), and lies in a memory file
(`memory_file`). Two memory files are written in turn. No rank may change its state before all ranks have
returned from `wait_for_copy`, which a collective ensures; then all ranks have one step in common.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import xxhash

from wanma.checkpoint.format.manifest import data_file_name, dump_json
from wanma.checkpoint.in_memory.memory_file import (
    HASH_CHUNK_BYTES,
    MemoryFileHeader,
    MemoryFileReader,
    MemoryFileWriter,
    open_memory_files,
)
from wanma.checkpoint.in_memory.partner_replication import PartnerReplicator
from wanma.checkpoint.load.reader import CheckpointSource
from wanma.checkpoint.save.commit import merge_rank_manifests
from wanma.checkpoint.save.file_buffer import FileBuffer
from wanma.job.errors import WanmaError
from wanma.job.run.worker import MemoryFilePaths

CopyTargets = dict[str, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class InMemoryCheckpointResult:
    """Result of a completed in-memory checkpoint on this rank, with its cost."""

    step: int
    bytes: int
    """Bytes of this rank's part."""
    start_seconds: float
    """Seconds of training that `begin` took."""
    wait_seconds: float
    """Seconds that `settle` waited."""
    cpu_seconds: float
    """Core seconds of the background copy."""
    is_memory_new: bool
    """True if the system had to provide the memory first, which takes longer than the copy."""


class InMemoryCheckpointer:
    """Writer of one rank's in-memory checkpoints, in two memory files used in turn.

    Args:
        memory_files: paths of the memory files.
        rank: this rank.
        world_size: number of ranks.
        generation: this start of the ranks.
        replicas: ranks that hold the same plain tensors (not DTensors) under the same names.
        node_ranks: ranks of this node: one of them copies what several of them hold.
        layout: text that determines which rank holds which shard.
        replicator: replicates each memory file to another node, after `wait_for_copy` and beside the next
            steps; until that has ended no other in-memory checkpoint may begin (`is_replicating`). None: no
            replication.

    Raises:
        WanmaError: a memory file cannot be opened.
    """

    def __init__(
        self,
        memory_files: MemoryFilePaths,
        rank: int,
        world_size: int,
        generation: int,
        *,
        replicas: Sequence[int] | None = None,
        node_ranks: Collection[int] | None = None,
        layout: str = "",
        replicator: PartnerReplicator | None = None,
    ) -> None:
        self.replicator = replicator
        self._header = MemoryFileHeader(0, generation, rank, world_size, hash_layout(layout))
        replicas = range(world_size) if replicas is None else replicas
        try:
            self._memory_files = [
                _BufferedMemoryFile(path, rank, replicas, node_ranks) for path in memory_files.own_paths
            ]
        except OSError as error:
            raise WanmaError(
                f"rank {rank} cannot open its memory file for in-memory checkpoints: {error}"
            ) from error
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._thread: threading.Thread | None = None
        self._copy_done = threading.Event()
        """Event that the thread sets when the copy is complete; the thread may go on with the replication."""
        self._is_copied = True
        self._start_seconds = 0.0
        self._result: InMemoryCheckpointResult | Exception | None = None

    def start(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        state: Mapping[str, Any],
        rank_state: Mapping[str, Any] | None = None,
        mutable_names: Collection[str] = (),
    ) -> None:
        """Start an in-memory checkpoint over the older memory file. Every rank calls it for the same steps.

        Args:
            step: completed optimizer steps.
            tensors: full name -> tensor or DTensor, of all that this rank holds; they must not change
                until `settle`.
            state: JSON-able, the same on all ranks.
            rank_state: JSON-able, of this rank alone.
            mutable_names: names of tensors that may change at once; they are copied before this returns.

        Raises:
            WanmaError: this state cannot be stored.
        """
        assert self._is_copied, "wait for the copy of the previous in-memory checkpoint"
        assert not self.is_replicating(), "wait until the previous in-memory checkpoint is sent"
        start_time = time.perf_counter()
        memory_file = self._memory_files[0]
        self._memory_files.reverse()
        rank_manifest: dict[str, Any] = {
            "rank": self._header.rank,
            "rank_state_json": None
            if rank_state is None
            else dump_json(dict(rank_state), "the rank's state"),
            "state": dict(state),
        }
        try:
            memory_file.writer.mark_incomplete(replace(self._header, step=step))
            targets = memory_file.buffer.copy_targets(tensors)
        except OSError as error:
            raise self._out_of_memory_error(error) from error
        with torch.no_grad():
            for name in targets.keys() & set(mutable_names):
                view, local = targets[name]
                targets[name] = view, local.clone()
        devices = {local.device for _, local in targets.values() if local.is_cuda}
        events = {device: torch.cuda.current_stream(device).record_event() for device in devices}
        self._start_thread(
            partial(self._copy_state, memory_file, step, targets, rank_manifest, events),
            f"in-memory-checkpoint-{step}",
        )
        self._start_seconds = time.perf_counter() - start_time

    def skip(self) -> None:
        """Skip a step on a rank that cannot `begin`: other nodes learn that they need not wait for it."""
        if self.replicator is not None:
            self._start_thread(lambda: None, "no-in-memory-checkpoint")
            self._is_copied = True

    def wait_for_copy(self) -> InMemoryCheckpointResult | None:
        """Wait for the in-memory checkpoint in progress; None if there is none.

        Raises:
            WanmaError: it failed. The one before it is intact.
        """
        if self._is_copied:
            return None
        start_time = time.perf_counter()
        self._copy_done.wait()
        self._is_copied = True
        result = self._result
        if isinstance(result, OSError):
            raise self._out_of_memory_error(result) from result
        if isinstance(result, Exception):
            raise result
        assert result is not None
        return replace(
            result, start_seconds=self._start_seconds, wait_seconds=time.perf_counter() - start_time
        )

    def is_replicating(self, seconds: float = 0.0) -> bool:
        """Return True if the exchange with other nodes is still in progress after waiting up to `seconds`."""
        if self._thread is not None and self._is_copied:
            self._thread.join(None if self.replicator is None else seconds)
            if not self._thread.is_alive():
                self._thread = None
        return self._thread is not None

    def stop_replication(self) -> None:
        """Stop the replication. An exchange that does not end is abandoned.

        The tensors that it sends may change meanwhile, which the receiver detects by the hash.
        """
        self.replicator = self._thread = None

    def required_bytes(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Estimate the additional bytes for in-memory checkpoints of these tensors and of backed-up ranks."""
        size = self._memory_files[0].buffer.shard_bytes(tensors)
        own_bytes = sum(
            max(size - memory_file.writer.allocated_bytes, 0) for memory_file in self._memory_files
        )
        # Equal nodes receive as much as they send; on unequal ones the receiver checks its own memory.
        backup_bytes = (
            max(2 * size - self.replicator.allocated_bytes, 0) if self.replicator is not None else 0
        )
        return own_bytes + backup_bytes

    def close(self, seconds: float | None = None) -> None:
        """Close the memory files, which stay intact; a copy in progress is finished first.

        Args:
            seconds: maximum time to wait for it; a copy from a GPU that hangs never ends.
        """
        if self._thread is not None:
            if seconds is not None:
                self._copy_done.wait(seconds)  # other nodes may be gone: their transfers are not awaited
            self._thread.join(0 if seconds is not None and self.replicator is not None else seconds)
            if self._thread.is_alive():
                return  # it goes on until the process ends
            self._thread = None
        for memory_file in self._memory_files:
            memory_file.close()
        self._memory_files = []
        if self.replicator is not None:
            self.replicator.close()

    # ------------------------------------------------------------ in the background

    def _start_thread(self, copy: Callable[[], str | None], name: str) -> None:
        self._result, self._is_copied = None, False
        self._copy_done.clear()
        self._thread = threading.Thread(target=self._copy_and_replicate, args=(copy,), name=name, daemon=True)
        self._thread.start()

    def _copy_and_replicate(self, copy: Callable[[], str | None]) -> None:
        partner = self.replicator
        path = None
        try:
            path = copy()
        except Exception as error:  # the thread has no caller: `settle` raises it
            self._result = error
        self._copy_done.set()
        if partner is not None:
            partner.replicate(path)

    def _copy_state(
        self,
        memory_file: _BufferedMemoryFile,
        step: int,
        targets: CopyTargets,
        rank_manifest: dict[str, Any],
        events: dict[torch.device, torch.cuda.Event],
    ) -> str:
        """Copy the state into the memory file; return its path."""
        start_cpu_time = time.thread_time()
        is_memory_new = memory_file.writer.allocated_bytes < len(memory_file.buffer.content)
        header = self._write_memory_file(memory_file, targets, rank_manifest, events)
        self._result = InMemoryCheckpointResult(
            step,
            header.content_bytes + header.rank_manifest_bytes,
            0.0,
            0.0,
            time.thread_time() - start_cpu_time,
            is_memory_new,
        )
        return memory_file.path

    def _write_memory_file(
        self,
        memory_file: _BufferedMemoryFile,
        targets: CopyTargets,
        rank_manifest: dict[str, Any],
        events: dict[torch.device, torch.cuda.Event],
    ) -> MemoryFileHeader:
        content = memory_file.buffer.content
        if content:
            rank_manifest["file"] = {
                "name": data_file_name(self._header.rank),
                "bytes": len(content),
                "sha256": "",
            }
        else:
            rank_manifest["file"] = None
        rank_manifest["tensors"] = {
            piece.name: [piece.dtype, piece.shape, piece.box.offset, piece.box.shape]
            for piece in memory_file.buffer.shards
        }
        packed = dump_json(rank_manifest, "the training state").encode()
        memory_file.reserve(len(packed), bool(events))
        with self._copy_streams(events), torch.no_grad():
            for view, local in targets.values():
                if local.is_cuda:
                    view.copy_(local, non_blocking=True)
        digest = xxhash.xxh3_128()
        data_bytes = sum(view.numel() * view.element_size() for view, _ in targets.values())
        digest.update(content[: len(content) - data_bytes])  # the header
        with torch.no_grad():
            for view, local in targets.values():
                _copy_and_hash(view, local, digest)
        return memory_file.writer.finish(len(content), digest, packed)

    @contextmanager
    def _copy_streams(self, events: dict[torch.device, torch.cuda.Event]) -> Iterator[None]:
        """Run copies from GPUs on separate streams, ordered after the work queued before `begin`."""
        for device, event in events.items():
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            self._streams[device].wait_event(event)
            torch.cuda.set_stream(self._streams[device])  # of this thread, which ends soon
        yield
        for device in events:
            self._streams[device].synchronize()

    def _out_of_memory_error(self, error: OSError) -> WanmaError:
        return WanmaError(
            f"no host memory for the memory files of rank {self._header.rank}: {error.strerror or error}",
            "set checkpoint.in_memory_every_steps = 'off', use more nodes, or shard the state "
            "(parallel.shard)",
        )


class _BufferedMemoryFile:
    """Memory file with the buffer that lies in it."""

    def __init__(
        self, path: str, rank: int, replicas: Sequence[int], node_ranks: Collection[int] | None
    ) -> None:
        self.path = path
        self.writer = MemoryFileWriter(path)
        self.buffer = FileBuffer(rank, replicas, allocator=self, writer_ranks=node_ranks)
        self._memory: torch.Tensor | None = None
        self._is_reserved = self._is_registered = False

    def allocate(self, size: int) -> torch.Tensor:
        self._release()
        self._memory = torch.frombuffer(self.writer.content(max(size, 1)), dtype=torch.uint8)
        return self._memory[:size]

    def release_pages(self) -> None:
        pass

    def reserve(self, rank_manifest_bytes: int, is_cuda: bool) -> None:
        """Reserve the memory, and pin it for copies from a GPU: twice as fast, and asynchronous."""
        if not self._is_reserved:
            self.writer.reserve(2 * rank_manifest_bytes)
            self._is_reserved = True
        if is_cuda and not self._is_registered and self._memory is not None:
            status = torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), self._memory.numel(), 0)
            if int(status) != 0:
                raise WanmaError(
                    f"cannot pin {self._memory.numel():,} bytes of host memory for a memory file: {status}",
                    "raise the limit of locked memory (ulimit -l), or set "
                    "checkpoint.in_memory_every_steps = 'off'",
                )
            self._is_registered = True

    def close(self) -> None:
        self._release()
        self.writer.close()

    def _release(self) -> None:
        if self._is_registered and self._memory is not None:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
        self._is_registered = self._is_reserved = False
        self._memory = None


def _copy_and_hash(view: torch.Tensor, local: torch.Tensor, digest: xxhash.xxh3_128) -> None:
    """Copy the data unless a GPU stream has done so, and hash it chunk by chunk, so that it is read once.

    Uses one core, whatever number of threads torch has: the others are computing.
    """
    target = view.reshape(-1).view(torch.uint8).numpy()
    source = 0
    if local.device.type == "cpu" and local.is_contiguous():
        source = local.data_ptr()
    elif not local.is_cuda:
        view.copy_(local)
    start, data = target.ctypes.data, target.data
    for offset in range(0, len(data), HASH_CHUNK_BYTES):
        size = min(HASH_CHUNK_BYTES, len(data) - offset)
        if source:
            ctypes.memmove(start + offset, source + offset, size)
        digest.update(data[offset : offset + size])


# ---------------------------------------------------------------- afterwards


class LocalCheckpoint:
    """Complete memory files of one step on this node.

    Args:
        memory_files: memory files by the rank that wrote them.
    """

    def __init__(self, memory_files: Mapping[int, MemoryFileReader]) -> None:
        self._memory_files = memory_files

    def open_source(self) -> CheckpointSource:
        """Return them as a source from which this node's ranks can load.

        Raises:
            WanmaError: the memory files do not belong together.
        """
        first = next(iter(self._memory_files.values())).header
        try:
            rank_manifests = {
                rank: reader.rank_manifest() for rank, reader in sorted(self._memory_files.items())
            }
            state = next(iter(rank_manifests.values()))["state"]
            world_size = None if len(rank_manifests) == first.world_size else first.world_size
            manifest = merge_rank_manifests(
                list(rank_manifests.values()), first.step, None, state, world_size
            )
        except (ValueError, KeyError, TypeError) as error:
            raise WanmaError(
                f"the in-memory checkpoint of step {first.step} cannot be read: {error}"
            ) from error
        readers = {data_file_name(rank): reader for rank, reader in self._memory_files.items()}
        return CheckpointSource(
            f"the in-memory checkpoint of step {first.step}", manifest, lambda file: readers[file].content
        )


def find_local_checkpoint(
    memory_files: MemoryFilePaths,
    step: int,
    rank: int,
    world_size: int,
    node_ranks: Sequence[int],
    layout: str = "",
) -> tuple[LocalCheckpoint, list[str]]:
    """Find the in-memory checkpoint of `step` on this node, of which this rank verifies its share.

    Args:
        memory_files: paths of the memory files.
        step: the step to look for.
        rank: this rank, in the present generation.
        world_size: the present number of ranks.
        node_ranks: the present ranks of this node.
        layout: text that determines which rank now holds which shard.

    Returns:
        The memory files found, usable if no rank has a problem; and this rank's problems, a sentence each.
    """
    readers = open_memory_files(memory_files.restore_paths, step)
    if not readers:
        return LocalCheckpoint(readers), [
            f"the node of rank {node_ranks[0]} has no memory file of step {step}"
        ]
    headers = [reader.header for reader in readers.values()]
    if len({(header.generation, header.world_size, header.layout_hash) for header in headers}) > 1:
        return LocalCheckpoint(readers), [f"the memory files of step {step} come from different generations"]
    expected: Sequence[int] = range(headers[0].world_size)
    if not readers.keys() >= set(expected) and (world_size, hash_layout(layout)) == (
        headers[0].world_size,
        headers[0].layout_hash,
    ):
        expected = node_ranks  # shards of other nodes' earlier ranks are needed by other nodes' present ranks
    missing = sorted(set(expected) - readers.keys())
    problems = [f"rank {owner} has no complete memory file of step {step}" for owner in missing]
    rank_share = sorted(readers)[list(node_ranks).index(rank) :: len(node_ranks)]
    problems += [
        f"the memory file of step {step}, rank {owner}, is damaged: its content differs from its hash"
        for owner in rank_share
        if not readers[owner].is_valid()
    ]
    return LocalCheckpoint(readers), problems


def hash_layout(layout: str) -> int:
    """Return the 64-bit hash of a layout, as memory file headers store it."""
    return int(xxhash.xxh3_64_intdigest(layout.encode()))
