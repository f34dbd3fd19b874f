"""Resharding of an in-memory checkpoint: each node gets the memory files that its ranks need parts of.

    if needs_reshard(images, step, worker, layout):      # every rank calls both
        source, problems, count = gather(images, step, worker, tensors_for)
        load(source, tensors)                                 # as from a checkpoint of any layout

A node uses the memory files that it has; each other one that some of its ranks need is sent to it once, in
full. That takes memory for these files until the state is loaded, and no more of the network than a node has
ranks before and after.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from wanma.checkpoint.format.local_shards import local_box
from wanma.checkpoint.format.manifest import Manifest, data_file_name, intersect_boxes
from wanma.checkpoint.in_memory.file_transfer import receive_memory_file, run_transfers, send_memory_file
from wanma.checkpoint.in_memory.in_memory_checkpointer import hash_layout
from wanma.checkpoint.in_memory.memory_file import (
    MemoryFileHeader,
    MemoryFileReader,
    MemoryFileWriter,
    read_header,
)
from wanma.checkpoint.in_memory.partner_ring import node_rank_ranges
from wanma.checkpoint.load.reader import CheckpointSource
from wanma.checkpoint.save.commit import merge_rank_manifests
from wanma.job.errors import WanmaError
from wanma.job.run.worker import MemoryFilePaths, WorkerContext

TensorSelector = Callable[[Iterable[str]], Mapping[str, torch.Tensor]]
"""Mapping from the names of all saved tensors to the tensors that this rank fills."""


def needs_reshard(memory_files: MemoryFilePaths, step: int, worker: WorkerContext, layout: str) -> bool:
    """Return True if the in-memory checkpoint of `step` has another number of ranks or another layout.

    Args:
        memory_files: paths of the memory files.
        step: the step of the in-memory checkpoint.
        worker: this rank's context.
        layout: text that determines which rank now holds which shard.
    """
    mine = {(head.world_size, head.layout_hash) for head in _read_headers(memory_files, step)}
    everyones = _all_gather_objects(mine, worker)
    return bool(set().union(*everyones) - {(worker.world_size, hash_layout(layout))})


def gather_for_reshard(
    memory_files: MemoryFilePaths, step: int, worker: WorkerContext, select_tensors: TensorSelector
) -> tuple[CheckpointSource | None, list[str], int]:
    """Transfer to each node the memory files of `step` that its ranks need parts of.

    Returns:
        The source to load from, None if there are problems; these, the same on all ranks, a sentence each;
        and the number of memory files sent.

    Raises:
        WanmaError: another rank is gone.
    """
    found, damaged = _open_and_verify(memory_files, step, worker)
    mine = {
        owner: {**image.rank_manifest(), "world_size": image.header.world_size}
        for owner, image in _rank_share(found, worker)
    }
    told = _all_gather_objects((mine, damaged), worker)
    spans = node_rank_ranges(worker.local_world_sizes)
    held = [sorted({owner for rank in span for owner in told[rank][0]}) for span in spans]
    here = {owner: found[owner] for owner in held[worker.node_rank]}
    tables = {owner: table for of_rank, _ in told for owner, table in of_rank.items()}
    manifest, problems = _merge_rank_manifests(tables, here, step)
    if manifest is None:
        return None, [*(text for _, texts in told for text in texts), *problems], 0

    needed = _all_gather_objects(_required_owners(manifest, select_tensors(manifest.tensors)), worker)
    wanted = [{owner for rank in span for owner in needed[rank]} for span in spans]
    fetches = plan_reshard(held, wanted, spans)
    with _ReceiveBuffers() as received:
        problems = _run_transfers(fetches, here, received, worker)
        paths = _all_gather_objects(received.paths, worker)
        for rank in worker.node_ranks:
            for owner, path in paths[rank].items():
                try:
                    here[owner] = MemoryFileReader(path)
                except (OSError, ValueError) as error:
                    problems.append(f"the in-memory checkpoint of rank {owner} was not received: {error}")
        everyones = _all_gather_objects(problems, worker)  # all ranks have opened the received files
    problems = list(dict.fromkeys(text for texts in everyones for text in texts))
    if problems:
        return None, problems, 0
    files = {data_file_name(owner): image for owner, image in here.items()}
    name = f"the in-memory checkpoint of step {step}"
    return CheckpointSource(name, manifest, lambda file: files[file].content), [], len(fetches)


@dataclass(frozen=True)
class ReshardTransfer:
    """Transfer of one memory file to a node."""

    owner: int
    """Rank that wrote it."""
    source: int
    target: int


def plan_reshard(
    available_owners: Sequence[Iterable[int]],
    needed_owners: Sequence[Iterable[int]],
    node_ranks: Sequence[range],
) -> list[ReshardTransfer]:
    """Plan the transfers of memory files: each node's ranks send and receive in turn.

    Args:
        available_owners: by node, the owners of the memory files there.
        needed_owners: by node, the owners whose memory files its ranks need; each is held somewhere.
        node_ranks: by node, its ranks.
    """
    holders: dict[int, list[int]] = {}
    for node, owners in enumerate(available_owners):
        for owner in owners:
            holders.setdefault(owner, []).append(node)
    fetches: list[ReshardTransfer] = []
    for node, owners in enumerate(needed_owners):
        lacking = sorted(set(owners) - set(available_owners[node]))
        for count, owner in enumerate(lacking):
            giving = node_ranks[holders[owner][node % len(holders[owner])]]
            taking = node_ranks[node]
            fetches.append(
                ReshardTransfer(owner, giving[(owner + node) % len(giving)], taking[count % len(taking)])
            )
    return fetches


class _ReceiveBuffers:
    """Memory of this rank for received files, released on exit; files opened by then stay mapped."""

    def __init__(self) -> None:
        self.paths: dict[int, str] = {}
        self._descriptors: list[int] = []

    def __enter__(self) -> _ReceiveBuffers:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)

    def allocate(self, owner: int) -> MemoryFileWriter:
        descriptor = os.memfd_create(f"wanma-image-of-{owner}", os.MFD_CLOEXEC)
        self._descriptors.append(descriptor)
        self.paths[owner] = f"/proc/{os.getpid()}/fd/{descriptor}"
        return MemoryFileWriter(self.paths[owner])


def _run_transfers(
    transfers: Sequence[ReshardTransfer],
    local_files: Mapping[int, MemoryFileReader],
    buffers: _ReceiveBuffers,
    worker: WorkerContext,
) -> list[str]:
    files, talks = [], []
    try:
        for one in transfers:
            if one.source == worker.rank:
                talks.append(send_memory_file(local_files[one.owner].path, one.owner, one.target))
            if one.target == worker.rank:
                files.append(buffers.allocate(one.owner))
                talks.append(receive_memory_file(files[-1], one.owner, one.source))
        return run_transfers(talks)
    except (OSError, RuntimeError) as error:
        raise WanmaError(
            f"an in-memory checkpoint could not be received from another node: {error}"
        ) from error
    finally:
        for file in files:
            file.close()


def _read_headers(memory_files: MemoryFilePaths, step: int) -> list[MemoryFileHeader]:
    heads = []
    for owner, paths in memory_files.restore_paths.items():
        for path in paths:
            try:
                head = read_header(path)
            except OSError:
                continue
            if head is not None and head.is_complete and (head.rank, head.step) == (owner, step):
                heads.append(head)
    return heads


def _open_and_verify(
    memory_files: MemoryFilePaths, step: int, worker: WorkerContext
) -> tuple[dict[int, MemoryFileReader], list[str]]:
    """Open the memory files of `step` on this node and verify this rank's share; return problems too."""
    found: dict[int, MemoryFileReader] = {}
    for owner, paths in memory_files.restore_paths.items():
        for path in paths:
            try:
                image = MemoryFileReader(path)
            except (OSError, ValueError):
                continue  # one of the two may always be unfinished
            if (image.header.step, image.header.rank) == (step, owner):
                found[owner] = image
    problems = []
    for owner, image in _rank_share(found, worker):
        if not image.is_valid():
            del found[owner]  # another node may have a valid one
            problems.append(
                f"the in-memory checkpoint of step {step}, rank {owner}, is damaged on node "
                f"{worker.node_rank}"
            )
    return found, problems


def _rank_share(
    memory_files: Mapping[int, MemoryFileReader], worker: WorkerContext
) -> list[tuple[int, MemoryFileReader]]:
    """Return this rank's share of the memory files that all ranks of a node see."""
    return [
        (owner, memory_files[owner])
        for owner in sorted(memory_files)
        if owner % worker.local_world_size == worker.local_rank
    ]


def _merge_rank_manifests(
    rank_manifests: Mapping[int, dict[str, Any]], local_owners: Iterable[int], step: int
) -> tuple[Manifest | None, list[str]]:
    """Merge the rank manifests into one; of equal boxes those on this node take precedence."""
    if not rank_manifests:
        return None, [f"no node has an in-memory checkpoint of step {step}"]
    world_size = next(iter(rank_manifests.values()))["world_size"]
    if lost := sorted(set(range(world_size)) - rank_manifests.keys()):
        return None, [f"no node has the in-memory checkpoint of step {step}, rank {owner}" for owner in lost]
    order = [*sorted(local_owners), *sorted(rank_manifests.keys() - set(local_owners))]
    try:
        merged = merge_rank_manifests(
            [rank_manifests[owner] for owner in order], step, None, rank_manifests[0]["state"]
        )
    except (WanmaError, ValueError, KeyError, TypeError) as error:
        return None, [f"the in-memory checkpoint of step {step} cannot be read: {error}"]
    return merged, []


def _required_owners(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> list[int]:
    """Return the ranks whose memory files hold a part of these tensors."""
    owners = {data_file_name(owner): owner for owner in range(manifest.world_size)}
    files: set[str] = set()
    for name, tensor in tensors.items():
        box, entry = local_box(name, tensor), manifest.tensors.get(name)
        if box is not None and entry is not None:
            files.update(shard.file for shard in entry.shards if intersect_boxes(box, shard.box) is not None)
    return sorted(owners[file] for file in files)


def _all_gather_objects(own: Any, worker: WorkerContext) -> list[Any]:
    everyones = [own] * worker.world_size
    if worker.world_size > 1:
        dist.all_gather_object(everyones, own)
    return everyones
