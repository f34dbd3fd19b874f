"""Checkpoints in memory that outlives the ranks, copied while they compute.

    snapshots = Snapshots(worker.images, rank, world_size, generation, ...)
    snapshots.begin(step, tensors, state)       # returns at once; a thread copies
    ...                                         # forward and backward of the next step
    snapshots.settle()                          # before any of the given tensors changes
    found, problems = look(images, step, ...)   # in the ranks' next generation: every rank a share
    load(found.source(), tensors)               # if no rank has found a problem

A rank's part is the content of its file in a checkpoint (`file_buffer`), in a memory file (`memory_file`).
Two are written in turn. If no rank changes its state before all have settled, which a collective between
`settle` and the change ensures, there is always one step of which every rank has a complete one.
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

from wanma.checkpoint.format.manifest import data_file, to_json
from wanma.checkpoint.in_memory.memory_file import CHUNK_BYTES, FoundImage, Head, ImageFile
from wanma.checkpoint.in_memory.partner_replication import Partner
from wanma.checkpoint.load.reader import Source
from wanma.checkpoint.save.commit import merge
from wanma.checkpoint.save.file_buffer import FileBuffer
from wanma.job.errors import WanmaError
from wanma.job.run.worker import Images

Places = dict[str, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Taken:
    """Result of a completed in-memory checkpoint on this rank, with its cost."""

    step: int
    bytes: int
    """Bytes of this rank's part."""
    begin_seconds: float
    """Seconds of training that `begin` took."""
    settle_seconds: float
    """Seconds that `settle` waited."""
    copy_seconds: float
    """Seconds of the background copy from beginning to end, hash included."""
    processor_seconds: float
    """Core seconds of the background copy."""


class Snapshots:
    """Writer of one rank's in-memory checkpoints, in two memory files used in turn.

    Args:
        images: paths of the memory files.
        rank: this rank.
        world_size: number of ranks.
        generation: this start of the ranks.
        replicas: ranks that hold the same plain tensors (not DTensors) under the same names.
        node_ranks: ranks of this node: one of them copies what several of them hold.
        layout: text that determines which rank holds which shard.
        partner: replicates each memory file to another node, after `settle` and beside the next steps; until
            that has ended no other in-memory checkpoint may begin (`is_sending`). None: no replication.

    Raises:
        WanmaError: a memory file cannot be opened.
    """

    def __init__(
        self,
        images: Images,
        rank: int,
        world_size: int,
        generation: int,
        *,
        replicas: Sequence[int] | None = None,
        node_ranks: Collection[int] | None = None,
        layout: str = "",
        partner: Partner | None = None,
    ) -> None:
        self.partner = partner
        self._head = Head(0, generation, rank, world_size, layout_number(layout))
        replicas = range(world_size) if replicas is None else replicas
        try:
            self._images = [_Image(path, rank, replicas, node_ranks) for path in images.mine]
        except OSError as error:
            raise WanmaError(f"rank {rank} cannot open the memory for snapshots: {error}") from error
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        """Event that the thread sets when the copy is complete; the thread may go on with the replication."""
        self._is_settled = True
        self._begin_seconds = 0.0
        self._result: Taken | Exception | None = None

    def begin(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        state: Mapping[str, Any],
        rank_state: Mapping[str, Any] | None = None,
        changing: Collection[str] = (),
    ) -> None:
        """Start an in-memory checkpoint over the older memory file. Every rank calls it for the same steps.

        Args:
            step: completed optimizer steps.
            tensors: full name -> tensor or DTensor, of all that this rank holds; they must not change
                until `settle`.
            state: JSON-able, the same on all ranks.
            rank_state: JSON-able, of this rank alone.
            changing: names of tensors that may change at once; they are copied before this returns.

        Raises:
            WanmaError: this state cannot be stored.
        """
        assert self._is_settled, "settle the snapshot before"
        assert not self.is_sending(), "wait until the snapshot before is sent"
        began = time.perf_counter()
        image = self._images[0]
        self._images.reverse()
        table: dict[str, Any] = {
            "rank": self._head.rank,
            "rank_state_json": None if rank_state is None else to_json(dict(rank_state), "the rank's state"),
            "state": dict(state),
        }
        try:
            image.file.begin(replace(self._head, step=step))
            places = image.buffer.places(tensors)
        except OSError as error:
            raise self._no_memory(error) from error
        with torch.no_grad():
            for name in places.keys() & set(changing):
                view, local = places[name]
                places[name] = view, local.clone()
        devices = {local.device for _, local in places.values() if local.is_cuda}
        events = {device: torch.cuda.current_stream(device).record_event() for device in devices}
        self._start(partial(self._take, image, step, places, table, events), f"snapshot-{step}")
        self._begin_seconds = time.perf_counter() - began

    def leave_out(self) -> None:
        """Skip a step on a rank that cannot `begin`: other nodes learn that they need not wait for it."""
        if self.partner is not None:
            self._start(lambda: None, "no-snapshot")
            self._is_settled = True

    def settle(self) -> Taken | None:
        """Wait for the in-memory checkpoint in progress; None if there is none.

        Raises:
            WanmaError: it failed. The one before it is intact.
        """
        if self._is_settled:
            return None
        began = time.perf_counter()
        self._copied.wait()
        self._is_settled = True
        result = self._result
        if isinstance(result, OSError):
            raise self._no_memory(result) from result
        if isinstance(result, Exception):
            raise result
        assert result is not None
        return replace(result, begin_seconds=self._begin_seconds, settle_seconds=time.perf_counter() - began)

    def is_sending(self, seconds: float = 0.0) -> bool:
        """Return True if the exchange with other nodes is still in progress after waiting up to `seconds`."""
        if self._thread is not None and self._is_settled:
            self._thread.join(None if self.partner is None else seconds)
            if not self._thread.is_alive():
                self._thread = None
        return self._thread is not None

    def drop_partner(self) -> None:
        """Stop the replication. An exchange that does not end is abandoned.

        The tensors that it sends may change meanwhile, which the receiver detects by the hash.
        """
        self.partner = self._thread = None

    def bytes_to_take(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Estimate the additional bytes for in-memory checkpoints of these tensors and of backed-up ranks."""
        size = self._images[0].buffer.bytes_of(tensors)
        own = sum(max(size - image.file.taken_bytes, 0) for image in self._images)
        # Equal nodes receive as much as they send; on unequal ones the receiver checks its own memory.
        guests = max(2 * size - self.partner.taken_bytes, 0) if self.partner is not None else 0
        return own + guests

    def close(self, seconds: float | None = None) -> None:
        """Close the memory files, which stay intact; a copy in progress is finished first.

        Args:
            seconds: maximum time to wait for it; a copy from a GPU that hangs never ends.
        """
        if self._thread is not None:
            if seconds is not None:
                self._copied.wait(seconds)  # other nodes may be gone: their transfers are not awaited
            self._thread.join(0 if seconds is not None and self.partner is not None else seconds)
            if self._thread.is_alive():
                return  # it goes on until the process ends
            self._thread = None
        for image in self._images:
            image.close()
        self._images = []
        if self.partner is not None:
            self.partner.close()

    # ------------------------------------------------------------ in the background

    def _start(self, copy: Callable[[], str | None], name: str) -> None:
        self._result, self._is_settled = None, False
        self._copied.clear()
        self._thread = threading.Thread(target=self._run, args=(copy,), name=name, daemon=True)
        self._thread.start()

    def _run(self, copy: Callable[[], str | None]) -> None:
        partner = self.partner
        path = None
        try:
            path = copy()
        except Exception as error:  # the thread has no caller: `settle` raises it
            self._result = error
        self._copied.set()
        if partner is not None:
            partner.exchange(path)

    def _take(
        self,
        image: _Image,
        step: int,
        places: Places,
        table: dict[str, Any],
        events: dict[torch.device, torch.cuda.Event],
    ) -> str:
        """Copy the state into the memory file; return its path."""
        began, began_processor = time.perf_counter(), time.thread_time()
        head = self._write(image, places, table, events)
        self._result = Taken(
            step,
            head.content_bytes + head.table_bytes,
            0.0,
            0.0,
            time.perf_counter() - began,
            time.thread_time() - began_processor,
        )
        return image.path

    def _write(
        self,
        image: _Image,
        places: Places,
        table: dict[str, Any],
        events: dict[torch.device, torch.cuda.Event],
    ) -> Head:
        content = image.buffer.content
        if content:
            table["file"] = {"name": data_file(self._head.rank), "bytes": len(content), "sha256": ""}
        else:
            table["file"] = None
        table["tensors"] = {
            piece.name: [piece.dtype, piece.shape, piece.box.offset, piece.box.shape]
            for piece in image.buffer.pieces
        }
        packed = to_json(table, "the training state").encode()
        image.reserve(len(packed), bool(events))
        with self._beside(events), torch.no_grad():
            for view, local in places.values():
                if local.is_cuda:
                    view.copy_(local, non_blocking=True)
        digest = xxhash.xxh3_128()
        data_bytes = sum(view.numel() * view.element_size() for view, _ in places.values())
        digest.update(content[: len(content) - data_bytes])  # the header
        with torch.no_grad():
            for view, local in places.values():
                _copy(view, local, digest)
        return image.file.finish(len(content), digest, packed)

    @contextmanager
    def _beside(self, events: dict[torch.device, torch.cuda.Event]) -> Iterator[None]:
        """Run copies from GPUs on separate streams, ordered after the work queued before `begin`."""
        for device, event in events.items():
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            self._streams[device].wait_event(event)
            torch.cuda.set_stream(self._streams[device])  # of this thread, which ends soon
        yield
        for device in events:
            self._streams[device].synchronize()

    def _no_memory(self, error: OSError) -> WanmaError:
        return WanmaError(
            f"no memory for rank {self._head.rank}'s snapshots: {error.strerror or error}",
            "set checkpoint.in_memory_every_steps = 'off', use more machines, or shard the state "
            "(parallel.shard)",
        )


class _Image:
    """Memory file with the buffer that lies in it."""

    def __init__(
        self, path: str, rank: int, replicas: Sequence[int], node_ranks: Collection[int] | None
    ) -> None:
        self.path = path
        self.file = ImageFile(path)
        self.buffer = FileBuffer(rank, replicas, room=self, among=node_ranks)
        self._memory: torch.Tensor | None = None
        self._is_reserved = self._is_registered = False

    def empty(self, size: int) -> torch.Tensor:
        self._release()
        self._memory = torch.frombuffer(self.file.content(max(size, 1)), dtype=torch.uint8)
        return self._memory[:size]

    def rest(self) -> None:
        pass

    def reserve(self, table_bytes: int, is_cuda: bool) -> None:
        """Reserve the memory, and pin it for copies from a GPU: twice as fast, and asynchronous."""
        if not self._is_reserved:
            self.file.reserve(2 * table_bytes)
            self._is_reserved = True
        if is_cuda and not self._is_registered and self._memory is not None:
            status = torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), self._memory.numel(), 0)
            if int(status) != 0:
                raise WanmaError(
                    f"cannot pin {self._memory.numel():,} bytes of memory for snapshots: {status}",
                    "raise the limit of locked memory, or set checkpoint.in_memory_every_steps = 'off'",
                )
            self._is_registered = True

    def close(self) -> None:
        self._release()
        self.file.close()

    def _release(self) -> None:
        if self._is_registered and self._memory is not None:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
        self._is_registered = self._is_reserved = False
        self._memory = None


def _copy(view: torch.Tensor, local: torch.Tensor, digest: xxhash.xxh3_128) -> None:
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
    for offset in range(0, len(data), CHUNK_BYTES):
        size = min(CHUNK_BYTES, len(data) - offset)
        if source:
            ctypes.memmove(start + offset, source + offset, size)
        digest.update(data[offset : offset + size])


# ---------------------------------------------------------------- afterwards


class Found:
    """Complete memory files of one step on this node.

    Args:
        images: memory files by the rank that wrote them.
    """

    def __init__(self, images: Mapping[int, FoundImage]) -> None:
        self._images = images

    def source(self) -> Source:
        """Return them as a source from which this node's ranks can load.

        Raises:
            WanmaError: the memory files do not belong together.
        """
        first = next(iter(self._images.values())).head
        try:
            tables = {rank: image.table() for rank, image in sorted(self._images.items())}
            state = next(iter(tables.values()))["state"]
            world_size = None if len(tables) == first.world_size else first.world_size
            manifest = merge(list(tables.values()), first.step, None, state, world_size)
        except (ValueError, KeyError, TypeError) as error:
            raise WanmaError(f"the snapshot of step {first.step} cannot be read: {error}") from error
        files = {data_file(rank): image for rank, image in self._images.items()}
        return Source(f"the snapshot of step {first.step}", manifest, lambda file: files[file].content)


def look(
    images: Images,
    step: int,
    rank: int,
    world_size: int,
    node_ranks: Sequence[int],
    layout: str = "",
) -> tuple[Found, list[str]]:
    """Find the in-memory checkpoint of `step` on this node, of which this rank verifies its share.

    Args:
        images: paths of the memory files.
        step: the step to look for.
        rank: this rank, in the present generation.
        world_size: the present number of ranks.
        node_ranks: the present ranks of this node.
        layout: text that determines which rank now holds which shard.

    Returns:
        The memory files found, usable if no rank has a problem; and this rank's problems, a sentence each.
    """
    found: dict[int, FoundImage] = {}
    for owner, paths in images.found.items():
        for path in paths:
            try:
                image = FoundImage(path)
            except (OSError, ValueError):
                continue  # one of the two may always be unfinished
            if (image.head.step, image.head.rank) == (step, owner):
                found[owner] = image
    if not found:
        return Found(found), [f"there is no snapshot of step {step}"]
    heads = [image.head for image in found.values()]
    if len({(head.generation, head.world_size, head.layout) for head in heads}) > 1:
        return Found(found), [f"the snapshots of step {step} are of different runs"]
    expected: Sequence[int] = range(heads[0].world_size)
    if not found.keys() >= set(expected) and (world_size, layout_number(layout)) == (
        heads[0].world_size,
        heads[0].layout,
    ):
        expected = node_ranks  # shards of other nodes' earlier ranks are needed by other nodes' present ranks
    missing = sorted(set(expected) - found.keys())
    problems = [f"rank {owner} left no whole snapshot of step {step}" for owner in missing]
    mine = sorted(found)[list(node_ranks).index(rank) :: len(node_ranks)]
    problems += [
        f"rank {owner}'s snapshot of step {step} is damaged: its content differs from its hash"
        for owner in mine
        if not found[owner].is_whole()
    ]
    return Found(found), problems


def layout_number(layout: str) -> int:
    """Return the 64-bit hash of a layout, as memory file headers store it."""
    return int(xxhash.xxh3_64_intdigest(layout.encode()))
