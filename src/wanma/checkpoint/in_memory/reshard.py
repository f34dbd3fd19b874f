"""Resharding of an in-memory checkpoint: each node gets the memory files that its ranks need parts of.

    if needs_reshard(memory_files, step, worker, layout):  # every rank calls both
        source, problems, count = gather_for_reshard(memory_files, step, worker, select_tensors)
        load(source, tensors)                              # as from a checkpoint of any layout

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
    open_memory_files,
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
    layouts = {(header.world_size, header.layout_hash) for header in _read_headers(memory_files, step)}
    layouts_by_rank = _all_gather_objects(layouts, worker)
    return bool(set().union(*layouts_by_rank) - {(worker.world_size, hash_layout(layout))})


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
    readers, damaged = _open_and_verify(memory_files, step, worker)
    rank_manifests = {
        owner: {**reader.rank_manifest(), "world_size": reader.header.world_size}
        for owner, reader in _rank_share(readers, worker)
    }
    gathered = _all_gather_objects((rank_manifests, damaged), worker)
    spans = node_rank_ranges(worker.local_world_sizes)
    available_owners = [sorted({owner for rank in span for owner in gathered[rank][0]}) for span in spans]
    local_files = {owner: readers[owner] for owner in available_owners[worker.node_rank]}
    tables = {owner: table for manifests, _ in gathered for owner, table in manifests.items()}
    manifest, problems = _merge_rank_manifests(tables, local_files, step)
    if manifest is None:
        return None, [*(text for _, texts in gathered for text in texts), *problems], 0

    needed_by_rank = _all_gather_objects(_required_owners(manifest, select_tensors(manifest.tensors)), worker)
    needed_owners = [{owner for rank in span for owner in needed_by_rank[rank]} for span in spans]
    transfers = plan_reshard(available_owners, needed_owners, spans)
    with _ReceiveBuffers() as buffers:
        problems = _run_transfers(transfers, local_files, buffers, worker)
        paths = _all_gather_objects(buffers.paths, worker)
        for rank in worker.node_ranks:
            for owner, path in paths[rank].items():
                try:
                    local_files[owner] = MemoryFileReader(path)
                except (OSError, ValueError) as error:
                    problems.append(f"the memory file of rank {owner} was not received: {error}")
        problems_by_rank = _all_gather_objects(problems, worker)  # all ranks have opened the received files
    problems = list(dict.fromkeys(text for texts in problems_by_rank for text in texts))
    if problems:
        return None, problems, 0
    files = {data_file_name(owner): reader for owner, reader in local_files.items()}
    name = f"the in-memory checkpoint of step {step}"
    return CheckpointSource(name, manifest, lambda file: files[file].content), [], len(transfers)


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
    transfers: list[ReshardTransfer] = []
    for node, owners in enumerate(needed_owners):
        missing = sorted(set(owners) - set(available_owners[node]))
        for count, owner in enumerate(missing):
            sources = node_ranks[holders[owner][node % len(holders[owner])]]
            targets = node_ranks[node]
            transfers.append(
                ReshardTransfer(owner, sources[(owner + node) % len(sources)], targets[count % len(targets)])
            )
    return transfers


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
    files, exchanges = [], []
    try:
        for transfer in transfers:
            if transfer.source == worker.rank:
                exchanges.append(
                    send_memory_file(local_files[transfer.owner].path, transfer.owner, transfer.target)
                )
            if transfer.target == worker.rank:
                files.append(buffers.allocate(transfer.owner))
                exchanges.append(receive_memory_file(files[-1], transfer.owner, transfer.source))
        return run_transfers(exchanges)
    except (OSError, RuntimeError) as error:
        raise WanmaError(
            f"an in-memory checkpoint could not be received from another node: {error}"
        ) from error
    finally:
        for file in files:
            file.close()


def _read_headers(memory_files: MemoryFilePaths, step: int) -> list[MemoryFileHeader]:
    headers = []
    for owner, paths in memory_files.restore_paths.items():
        for path in paths:
            try:
                header = read_header(path)
            except OSError:
                continue
            if header is not None and header.is_complete and (header.rank, header.step) == (owner, step):
                headers.append(header)
    return headers


def _open_and_verify(
    memory_files: MemoryFilePaths, step: int, worker: WorkerContext
) -> tuple[dict[int, MemoryFileReader], list[str]]:
    """Open the memory files of `step` on this node and verify this rank's share; return problems too."""
    readers = open_memory_files(memory_files.restore_paths, step)
    problems = []
    for owner, reader in _rank_share(readers, worker):
        if not reader.is_valid():
            del readers[owner]  # another node may have a valid one
            problems.append(
                f"the memory file of step {step}, rank {owner}, is damaged on node {worker.node_rank}"
            )
    return readers, problems


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
        return None, [f"no node has a memory file of step {step}"]
    world_size = next(iter(rank_manifests.values()))["world_size"]
    if missing := sorted(set(range(world_size)) - rank_manifests.keys()):
        return None, [f"no node has the memory file of step {step}, rank {owner}" for owner in missing]
    order = [*sorted(local_owners), *sorted(rank_manifests.keys() - set(local_owners))]
    try:
        manifest = merge_rank_manifests(
            [rank_manifests[owner] for owner in order], step, None, rank_manifests[0]["state"]
        )
    except (WanmaError, ValueError, KeyError, TypeError) as error:
        return None, [f"the memory files of step {step} cannot be read: {error}"]
    return manifest, []


def _required_owners(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> list[int]:
    """Return the ranks whose memory files hold a part of these tensors."""
    owners = {data_file_name(owner): owner for owner in range(manifest.world_size)}
    files: set[str] = set()
    for name, tensor in tensors.items():
        box, entry = local_box(name, tensor), manifest.tensors.get(name)
        if box is not None and entry is not None:
            files.update(shard.file for shard in entry.shards if intersect_boxes(box, shard.box) is not None)
    return sorted(owners[file] for file in files)


def _all_gather_objects(value: Any, worker: WorkerContext) -> list[Any]:
    objects_by_rank = [value] * worker.world_size
    if worker.world_size > 1:
        dist.all_gather_object(objects_by_rank, value)
    return objects_by_rank
