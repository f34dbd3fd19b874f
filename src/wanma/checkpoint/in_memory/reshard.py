"""Resharding of an in-memory checkpoint: each node gets the memory files that its ranks need parts of.

    if laid_out_otherwise(images, step, worker, layout):      # every rank calls both
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
from wanma.checkpoint.format.manifest import Manifest, data_file, overlap
from wanma.checkpoint.in_memory.file_transfer import converse, receive_image, send_image
from wanma.checkpoint.in_memory.in_memory_checkpointer import layout_number
from wanma.checkpoint.in_memory.memory_file import FoundImage, ImageFile, read_head
from wanma.checkpoint.in_memory.partner_ring import node_spans
from wanma.checkpoint.load.reader import Source
from wanma.checkpoint.save.commit import merge
from wanma.job.errors import WanmaError
from wanma.job.run.worker import Images, Worker

TensorsFor = Callable[[Iterable[str]], Mapping[str, torch.Tensor]]
"""Mapping from the names of all saved tensors to the tensors that this rank fills."""


def laid_out_otherwise(images: Images, step: int, worker: Worker, layout: str) -> bool:
    """Return True if the in-memory checkpoint of `step` has another number of ranks or another layout.

    Args:
        images: paths of the memory files.
        step: the step of the in-memory checkpoint.
        worker: this rank's context.
        layout: text that determines which rank now holds which shard.
    """
    mine = {(head.world_size, head.layout) for head in _heads(images, step)}
    everyones = _everyones(mine, worker)
    return bool(set().union(*everyones) - {(worker.world_size, layout_number(layout))})


def gather(
    images: Images, step: int, worker: Worker, tensors_for: TensorsFor
) -> tuple[Source | None, list[str], int]:
    """Transfer to each node the memory files of `step` that its ranks need parts of.

    Returns:
        The source to load from, None if there are problems; these, the same on all ranks, a sentence each;
        and the number of memory files sent.

    Raises:
        WanmaError: another rank is gone.
    """
    found, damaged = _whole(images, step, worker)
    mine = {
        owner: {**image.table(), "world_size": image.head.world_size}
        for owner, image in _share(found, worker)
    }
    told = _everyones((mine, damaged), worker)
    spans = node_spans(worker.ranks_by_node)
    held = [sorted({owner for rank in span for owner in told[rank][0]}) for span in spans]
    here = {owner: found[owner] for owner in held[worker.node_rank]}
    tables = {owner: table for of_rank, _ in told for owner, table in of_rank.items()}
    manifest, problems = _manifest(tables, here, step)
    if manifest is None:
        return None, [*(text for _, texts in told for text in texts), *problems], 0

    needed = _everyones(_needed(manifest, tensors_for(manifest.tensors)), worker)
    wanted = [{owner for rank in span for owner in needed[rank]} for span in spans]
    fetches = plan_fetches(held, wanted, spans)
    with _Received() as received:
        problems = _exchange(fetches, here, received, worker)
        paths = _everyones(received.paths, worker)
        for rank in worker.node_ranks:
            for owner, path in paths[rank].items():
                try:
                    here[owner] = FoundImage(path)
                except (OSError, ValueError) as error:
                    problems.append(f"rank {owner}'s snapshot did not arrive: {error}")
        everyones = _everyones(problems, worker)  # all ranks have opened the received files
    problems = list(dict.fromkeys(text for texts in everyones for text in texts))
    if problems:
        return None, problems, 0
    files = {data_file(owner): image for owner, image in here.items()}
    name = f"the snapshot of step {step}"
    return Source(name, manifest, lambda file: files[file].content), [], len(fetches)


@dataclass(frozen=True)
class Fetch:
    """Transfer of one memory file to a node."""

    owner: int
    """Rank that wrote it."""
    source: int
    target: int


def plan_fetches(
    held: Sequence[Iterable[int]], wanted: Sequence[Iterable[int]], spans: Sequence[range]
) -> list[Fetch]:
    """Plan the transfers of memory files: each node's ranks send and receive in turn.

    Args:
        held: by node, the owners of the memory files there.
        wanted: by node, the owners whose memory files its ranks need; each is held somewhere.
        spans: by node, its ranks.
    """
    holders: dict[int, list[int]] = {}
    for node, owners in enumerate(held):
        for owner in owners:
            holders.setdefault(owner, []).append(node)
    fetches: list[Fetch] = []
    for node, owners in enumerate(wanted):
        lacking = sorted(set(owners) - set(held[node]))
        for count, owner in enumerate(lacking):
            giving = spans[holders[owner][node % len(holders[owner])]]
            taking = spans[node]
            fetches.append(Fetch(owner, giving[(owner + node) % len(giving)], taking[count % len(taking)]))
    return fetches


class _Received:
    """Memory of this rank for received files, released on exit; files opened by then stay mapped."""

    def __init__(self) -> None:
        self.paths: dict[int, str] = {}
        self._descriptors: list[int] = []

    def __enter__(self) -> _Received:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)

    def new(self, owner: int) -> ImageFile:
        descriptor = os.memfd_create(f"wanma-image-of-{owner}", os.MFD_CLOEXEC)
        self._descriptors.append(descriptor)
        self.paths[owner] = f"/proc/{os.getpid()}/fd/{descriptor}"
        return ImageFile(self.paths[owner])


def _exchange(
    fetches: Sequence[Fetch], here: Mapping[int, FoundImage], received: _Received, worker: Worker
) -> list[str]:
    files, talks = [], []
    try:
        for one in fetches:
            if one.source == worker.rank:
                talks.append(send_image(here[one.owner].path, one.owner, one.target))
            if one.target == worker.rank:
                files.append(received.new(one.owner))
                talks.append(receive_image(files[-1], one.owner, one.source))
        return converse(talks)
    except (OSError, RuntimeError) as error:
        raise WanmaError(f"a snapshot could not be fetched from another node: {error}") from error
    finally:
        for file in files:
            file.close()


def _heads(images: Images, step: int) -> list[Any]:
    heads = []
    for owner, paths in images.found.items():
        for path in paths:
            try:
                head = read_head(path)
            except OSError:
                continue
            if head is not None and head.complete and (head.rank, head.step) == (owner, step):
                heads.append(head)
    return heads


def _whole(images: Images, step: int, worker: Worker) -> tuple[dict[int, FoundImage], list[str]]:
    """Open the memory files of `step` on this node and verify this rank's share; return problems too."""
    found: dict[int, FoundImage] = {}
    for owner, paths in images.found.items():
        for path in paths:
            try:
                image = FoundImage(path)
            except (OSError, ValueError):
                continue  # one of the two may always be unfinished
            if (image.head.step, image.head.rank) == (step, owner):
                found[owner] = image
    problems = []
    for owner, image in _share(found, worker):
        if not image.is_whole():
            del found[owner]  # another node may have a valid one
            problems.append(f"rank {owner}'s snapshot of step {step} is damaged on node {worker.node_rank}")
    return found, problems


def _share(found: Mapping[int, FoundImage], worker: Worker) -> list[tuple[int, FoundImage]]:
    """Return this rank's share of the memory files that all ranks of a node see."""
    return [
        (owner, found[owner])
        for owner in sorted(found)
        if owner % worker.local_world_size == worker.local_rank
    ]


def _manifest(
    tables: Mapping[int, dict[str, Any]], near: Iterable[int], step: int
) -> tuple[Manifest | None, list[str]]:
    """Merge the rank manifests into one; of equal boxes those on this node take precedence."""
    if not tables:
        return None, [f"nobody has a snapshot of step {step}"]
    world_size = next(iter(tables.values()))["world_size"]
    if lost := sorted(set(range(world_size)) - tables.keys()):
        return None, [f"nobody has rank {owner}'s snapshot of step {step}" for owner in lost]
    order = [*sorted(near), *sorted(tables.keys() - set(near))]
    try:
        merged = merge([tables[owner] for owner in order], step, None, tables[0]["state"])
    except (WanmaError, ValueError, KeyError, TypeError) as error:
        return None, [f"the snapshot of step {step} cannot be read: {error}"]
    return merged, []


def _needed(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> list[int]:
    """Return the ranks whose memory files hold a part of these tensors."""
    owners = {data_file(owner): owner for owner in range(manifest.world_size)}
    files: set[str] = set()
    for name, tensor in tensors.items():
        box, entry = local_box(name, tensor), manifest.tensors.get(name)
        if box is not None and entry is not None:
            files.update(shard.file for shard in entry.shards if overlap(box, shard.box) is not None)
    return sorted(owners[file] for file in files)


def _everyones(mine: Any, worker: Worker) -> list[Any]:
    everyones = [mine] * worker.world_size
    if worker.world_size > 1:
        dist.all_gather_object(everyones, mine)
    return everyones
