"""Images on their way from rank to rank, and back after a loss."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash

from support.images import Held
from support.ranks import run_ranks
from wanma.checkpoint.in_memory import partner_replication
from wanma.checkpoint.in_memory.file_transfer import CHUNK_BYTES, FIRST_MESSAGE_BYTES, MIN_CHUNK_BYTES
from wanma.checkpoint.in_memory.in_memory_checkpointer import find_local_checkpoint, hash_layout
from wanma.checkpoint.in_memory.memory_file import (
    HEADER_BYTES,
    MemoryFileHeader,
    MemoryFileReader,
    MemoryFileWriter,
    unpack_header,
)
from wanma.checkpoint.in_memory.partner_replication import PartnerReplicator
from wanma.checkpoint.in_memory.partner_ring import backed_up_ranks, node_of, node_rank_ranges
from wanma.checkpoint.in_memory.restore import restore_lost_files
from wanma.job.run.worker import MemoryFilePaths, WorkerContext

BYTES = 2 * CHUNK_BYTES + 777
YIELDED_BYTES = 12 * MIN_CHUNK_BYTES + 777
"""Size of an image whose every chunk waits for training."""


def leave(held: Held, rank: int, step: int, ranks: int, size: int = BYTES) -> None:
    """An image as rank `rank` would, of several chunks and told apart from any other."""
    image = MemoryFileWriter(held.images(rank).own_paths[step % 2])
    content = image.content(size)
    image.mark_incomplete(MemoryFileHeader(step, 1, rank, ranks, hash_layout("")))
    content[:] = bytes([(7 * rank + step) % 256]) * size
    image.finish(size, xxhash.xxh3_128(content), b'{"rank": %d}' % rank)
    content.release()
    image.close()


def body(path: str) -> bytes:
    return bytes(MemoryFileReader(path).body)


def guests(kept: Held, rank: int, ranks_by_node: tuple[int, ...]) -> dict[int, tuple[str, ...]]:
    """Files for what `rank` takes: those of `kept` by the guest's rank."""
    return {guest: kept.images(guest).own_paths for guest in backed_up_ranks(rank, ranks_by_node)}


def on_nodes(worker: WorkerContext, ranks_by_node: tuple[int, ...]) -> WorkerContext:
    node = node_of(worker.rank, ranks_by_node)
    span = node_rank_ranges(ranks_by_node)[node]
    return replace(
        worker,
        node_rank=node,
        local_rank=worker.rank - span.start,
        local_world_size=len(span),
        local_world_sizes=ranks_by_node,
    )


def join(worker: WorkerContext, seconds: float = 60) -> None:
    store = dist.TCPStore(worker.store_host, worker.store_port, is_master=False)
    silence = timedelta(seconds=seconds)
    dist.init_process_group(
        "gloo", store=store, rank=worker.rank, world_size=worker.world_size, timeout=silence
    )


def test_a_head_is_read_from_its_bytes_and_from_no_others() -> None:
    head = MemoryFileHeader(3, 1, 2, 4, 5, True, 10, 20, bytes(range(16)))
    packed = head.pack()
    assert unpack_header(packed) == head
    assert unpack_header(packed[:-1]) is None
    assert unpack_header(packed + b"\0") is None
    assert unpack_header(bytes([packed[0] ^ 1]) + packed[1:]) is None


@pytest.mark.parametrize("ranks_by_node", [(1, 1), (1, 1, 1), (2, 1), (1, 2)], ids=str)
def test_partners_have_the_last_two_images_bit_for_bit(ranks_by_node: tuple[int, ...]) -> None:
    ranks = sum(ranks_by_node)
    held, kept = Held(ranks), Held(ranks)
    files = [
        replace(held.images(rank), backup_paths=guests(kept, rank, ranks_by_node)) for rank in range(ranks)
    ]
    for step in (1, 2, 3):
        for rank in range(ranks):
            leave(held, rank, step, ranks)
        problems = run_ranks(_exchange, ranks, (files, ranks_by_node, step), is_reused=True)
        assert problems == [""] * ranks
        files = [
            replace(one, backup_paths={g: paths[::-1] for g, paths in one.backup_paths.items()})
            for one in files
        ]
    for rank in range(ranks):
        assert kept.heads(rank) == held.heads(rank)
        assert [head.step for head in kept.heads(rank)] == [3, 2]
        copies = {MemoryFileReader(path).header.step: body(path) for path in kept.images(rank).own_paths}
        assert copies == {
            MemoryFileReader(path).header.step: body(path) for path in held.images(rank).own_paths
        }


def test_an_exchange_lets_training_pass_and_ends_nevertheless() -> None:
    """Rank 0 is always busy, rank 1 every other time it is asked."""
    held, kept, files = two_nodes(YIELDED_BYTES)
    assert run_ranks(_yielding_exchange, 2, (files,), is_reused=True) == ["", ""]
    for rank in range(2):
        copies = {MemoryFileReader(path).header.step: body(path) for path in kept.images(rank).own_paths}
        assert copies == {
            MemoryFileReader(path).header.step: body(path) for path in held.images(rank).own_paths
        }


def _yielding_exchange(worker: WorkerContext, files: list[MemoryFilePaths]) -> str:
    usual = partner_replication.MAX_YIELD_SECONDS
    partner_replication.MAX_YIELD_SECONDS = 0.2  # in this process
    join(worker)
    try:
        asked = [0]

        def is_busy() -> bool:
            asked[0] += 1
            return worker.rank == 0 or asked[0] % 2 == 1

        group = dist.new_group(backend="gloo")
        partner = PartnerReplicator(files[worker.rank], worker.rank, (1, 1), group, is_busy)
        partner.replicate(files[worker.rank].own_paths[1])
        partner.close()
        return partner.failure_reason or ("" if asked[0] > 3 else f"training was asked {asked[0]} times")
    finally:
        partner_replication.MAX_YIELD_SECONDS = usual
        dist.destroy_process_group()


def _exchange(
    worker: WorkerContext, files: list[MemoryFilePaths], ranks_by_node: tuple[int, ...], step: int
) -> str:
    join(worker)
    try:
        mine = files[worker.rank]
        partner = PartnerReplicator(mine, worker.rank, ranks_by_node, dist.new_group(backend="gloo"))
        partner.replicate(mine.own_paths[step % 2])
        partner.close()
        return partner.failure_reason
    finally:
        dist.destroy_process_group()


@pytest.fixture
def pair() -> tuple[Held, Held, list[MemoryFilePaths]]:
    return two_nodes(BYTES)


def two_nodes(size: int) -> tuple[Held, Held, list[MemoryFilePaths]]:
    """Two nodes of a rank each, whose step 4 is on both, and step 5 on their own."""
    held, kept = Held(2), Held(2)
    for rank in range(2):
        leave(held, rank, 4, 2, size)
        leave(kept, rank, 4, 2, size)
        leave(held, rank, 5, 2, size)
    # Step 4 lies in the first file; the second is to be written.
    return (
        held,
        kept,
        [
            replace(held.images(rank), backup_paths={1 - rank: kept.images(1 - rank).own_paths[::-1]})
            for rank in range(2)
        ],
    )


def test_an_image_that_is_damaged_counts_for_nothing_at_the_partner(pair: Any) -> None:
    held, kept, files = pair
    held.flip(1, 5, HEADER_BYTES + BYTES - 1)
    assert run_ranks(_exchange, 2, (files, (1, 1), 5), is_reused=True) == [
        "the memory file of step 5, rank 1, was received damaged: its content differs from its hash",
        "",
    ]
    assert [head.step for head in kept.heads(0)] == [5, 4]
    assert [head.step for head in kept.heads(1)] == [4]


def test_a_rank_without_an_image_is_not_waited_for(pair: Any) -> None:
    _, kept, files = pair
    assert run_ranks(_exchange_nothing_on_rank_0, 2, (files,), is_reused=True) == [
        "",
        "rank 0 has no complete memory file to send",
    ]
    assert [head.step for head in kept.heads(0)] == [4]
    assert [head.step for head in kept.heads(1)] == [5, 4]


def _exchange_nothing_on_rank_0(worker: WorkerContext, files: list[MemoryFilePaths]) -> str:
    join(worker)
    partner = PartnerReplicator(files[worker.rank], worker.rank, (1, 1), dist.new_group(backend="gloo"))
    partner.replicate(None if worker.rank == 0 else files[1].own_paths[1])
    dist.destroy_process_group()
    return partner.failure_reason


def test_a_partner_without_memory_says_so_and_takes_nothing(pair: Any) -> None:
    _, kept, files = pair
    assert run_ranks(_exchange_without_memory_on_rank_0, 2, (files,)) == [
        "no host memory for the memory file of rank 1: Cannot allocate memory",
        "",
    ]
    assert [head.step for head in kept.heads(1)] == [4]


def _exchange_without_memory_on_rank_0(worker: WorkerContext, files: list[MemoryFilePaths]) -> str:
    def none_left(self: MemoryFileWriter, rank_manifest_bytes: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    if worker.rank == 0:
        MemoryFileWriter.reserve = none_left  # type: ignore[method-assign]  # in this process
    return _exchange(worker, files, (1, 1), 5)


def test_a_partner_that_is_gone_ends_the_exchange_and_leaves_the_copy_before(pair: Any) -> None:
    _, kept, files = pair
    problem, _ = run_ranks(_exchange_that_rank_1_leaves, 2, (files,))
    assert problem.startswith("the exchange with the partner node failed: ")
    assert [head.step for head in kept.heads(1)] == [4]


def _exchange_that_rank_1_leaves(worker: WorkerContext, files: list[MemoryFilePaths]) -> str:
    join(worker, seconds=1000)  # longer than a test
    group = dist.new_group(backend="gloo")
    partner = PartnerReplicator(files[worker.rank], worker.rank, (1, 1), group)
    if worker.rank == 1:  # after the first message
        dist.recv(torch.empty(FIRST_MESSAGE_BYTES, dtype=torch.uint8), 0, group, 0)
        dist.destroy_process_group()
        return ""
    partner.replicate(files[0].own_paths[1])
    return partner.failure_reason


def test_a_lost_node_fetches_its_images_from_its_partner() -> None:
    """Two nodes of two ranks; the second is another machine now."""
    held, kept, new = Held(4), Held(2), Held(2)
    for rank in range(4):
        leave(held, rank, 6, 4)
    for guest in range(2):
        leave_as(kept, guest, 2 + guest, 6)
    first = {rank: held.images(rank).own_paths for rank in (0, 1)}
    first |= {2 + guest: kept.images(guest).own_paths for guest in range(2)}
    images = [replace(held.images(rank), restore_paths=first, restore_step=6) for rank in range(2)]
    images += [replace(new.images(rank), restore_step=6) for rank in range(2)]
    got = run_ranks(_fetch, 4, (images, (2, 2), 6), is_reused=True)
    assert [(problems, fetched) for _, problems, fetched, _ in got] == [([], 2)] * 4
    assert [found for found, *_ in got] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [looked for *_, looked in got] == [[], [], [], []]
    for local_rank in range(2):
        assert new.heads(local_rank) == held.heads(2 + local_rank)
        assert body(new.images(local_rank).own_paths[1]) == body(held.images(2 + local_rank).own_paths[0])


def leave_as(kept: Held, place: int, rank: int, step: int) -> None:
    whole = Held(rank + 1)
    leave(whole, rank, step, 4)
    found = MemoryFileReader(whole.images(rank).own_paths[step % 2])
    image = MemoryFileWriter(kept.images(place).own_paths[0])
    image.content(len(found.body))[:] = found.body
    image.finish_received(found.header)
    image.close()


def _fetch(
    worker: WorkerContext, images: list[MemoryFilePaths], ranks_by_node: tuple[int, ...], step: int
) -> tuple[list[int], list[str], int, list[str]]:
    join(worker)
    try:
        placed = on_nodes(worker, ranks_by_node)
        mine, problems, fetched = restore_lost_files(images[worker.rank], step, placed)
        _, looked = find_local_checkpoint(mine, step, worker.rank, worker.world_size, placed.node_ranks)
        dist.barrier()
        return sorted(mine.restore_paths), problems, fetched, looked
    finally:
        dist.destroy_process_group()


def test_what_nobody_has_is_named_and_nothing_is_fetched() -> None:
    held, new = Held(2), Held(1)
    for rank in range(2):
        leave(held, rank, 6, 2)
    images = [
        replace(held.images(0), restore_paths={0: held.images(0).own_paths}, restore_step=6),
        replace(new.images(0), restore_step=6),
    ]
    lost = "the memory file of step 6, rank 1, is missing on node 1 and on its partner, node 0"
    got = run_ranks(_fetch, 2, (images, (1, 1), 6), is_reused=True)
    assert [(problems, fetched) for _, problems, fetched, _ in got] == [([lost], 0)] * 2
    assert new.heads(0) == []


def test_a_copy_that_was_damaged_is_not_taken_up() -> None:
    held, new = Held(2), Held(1)
    for rank in range(2):
        leave(held, rank, 6, 2)
    held.flip(1, 6, HEADER_BYTES + 5)
    found = {rank: held.images(rank).own_paths for rank in range(2)}
    images = [
        replace(held.images(0), restore_paths=found, restore_step=6),
        replace(new.images(0), restore_step=6),
    ]
    got = run_ranks(_fetch, 2, (images, (1, 1), 6), is_reused=True)
    assert got[1][1] == [
        "the memory file of step 6, rank 1, was received damaged: its content differs from its hash"
    ]
    assert got[1][3] == ["the node of rank 1 has no memory file of step 6"]
