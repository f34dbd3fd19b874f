"""Images that ranks of another layout take up: each node gets those that its ranks need, and no others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from support.images import Held
from support.ranks import run_ranks
from wanma.checkpoint.in_memory.in_memory_checkpointer import InMemoryCheckpointer
from wanma.checkpoint.in_memory.memory_file import HEADER_BYTES
from wanma.checkpoint.in_memory.reshard import gather_for_reshard, needs_reshard, plan_reshard
from wanma.checkpoint.load.reader import load_tensors
from wanma.job.run.worker import MemoryFilePaths, WorkerContext

SPANS = [range(2), range(2, 3), range(3, 5)]


@given(st.lists(st.sets(st.integers(0, 5)), min_size=3, max_size=3), st.data())
def test_each_node_gets_what_it_lacks_once_from_one_that_has_it(
    held: list[set[int]], data: st.DataObject
) -> None:
    somewhere = sorted(set().union(*held))
    wanted = [data.draw(st.sets(st.sampled_from(somewhere))) if somewhere else set() for _ in held]
    fetches = plan_reshard([sorted(owners) for owners in held], wanted, SPANS)
    node = {rank: number for number, span in enumerate(SPANS) for rank in span}
    assert all(one.owner in held[node[one.source]] for one in fetches)
    arrived = [(node[one.target], one.owner) for one in fetches]
    assert sorted(arrived) == sorted(
        (number, owner) for number in range(3) for owner in wanted[number] - held[number]
    )


@pytest.fixture
def held() -> Held:
    """Three ranks have left step 5: each a part of its own, and one that all hold."""
    held = Held(3)
    for rank in range(3):
        snapshots = InMemoryCheckpointer(held.images(rank), rank, 3, 1, replicas=range(3), node_ranks=[rank])
        tensors = {f"model.{rank}": torch.full((100,), float(rank)), "model.all": torch.arange(6.0)}
        snapshots.start(5, tensors, {"step": 5})
        snapshots.wait_for_copy()
        snapshots.close()
    return held


def two_nodes(held: Held, on_node: dict[int, list[int]]) -> list[MemoryFilePaths]:
    """In-memory checkpoint files of two ranks, on nodes that hold those of these ranks."""
    new = Held(2)
    images = [
        replace(
            new.images(node),
            restore_paths={owner: held.images(owner).own_paths for owner in owners},
            restore_step=5,
        )
        for node, owners in on_node.items()
    ]
    two_nodes.keep = new  # type: ignore[attr-defined]  # its files live as long as it
    return images


def test_what_a_node_lacks_is_sent_and_loads_as_from_a_checkpoint(held: Held) -> None:
    images = two_nodes(held, {0: [0, 2], 1: [1]})
    got = run_ranks(_take, 2, (images,), is_reused=True)
    assert got == [(True, [], 1, [0.0], 5), (True, [], 1, [1.0, 2.0], 5)]


def test_a_damaged_copy_is_made_good_by_another(held: Held) -> None:
    other = Held(3)
    snapshots = InMemoryCheckpointer(other.images(2), 2, 3, 1, replicas=range(3), node_ranks=[2])
    snapshots.start(5, {"model.2": torch.full((100,), 2.0), "model.all": torch.arange(6.0)}, {"step": 5})
    snapshots.wait_for_copy()
    snapshots.close()
    held.flip(2, 5, HEADER_BYTES + 300)
    images = two_nodes(held, {0: [0, 2], 1: [1]})
    got = run_ranks(_take, 2, (images,), is_reused=True)
    assert [one[1] for one in got] == [
        [
            "the memory file of step 5, rank 2, is damaged on node 0",
            "no node has the memory file of step 5, rank 2",
        ]
    ] * 2
    images[1] = replace(images[1], restore_paths={**images[1].restore_paths, 2: other.images(2).own_paths})
    assert [one[:2] for one in run_ranks(_take, 2, (images,), is_reused=True)] == [(True, [])] * 2


def _take(worker: WorkerContext, images: list[MemoryFilePaths]) -> Any:
    store = worker.store
    if store is None:
        store = dist.TCPStore(worker.store_host, worker.store_port, is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=worker.rank, world_size=worker.world_size)
    try:
        placed = replace(
            worker, node_rank=worker.rank, local_rank=0, local_world_size=1, local_world_sizes=(1, 1)
        )
        parts = [[0], [1, 2]][worker.rank]
        tensors = {f"model.{part}": torch.zeros(100) for part in parts}
        tensors["model.all"] = torch.zeros(6)
        mine = images[worker.rank]
        is_new = needs_reshard(mine, 5, placed, "")
        source, problems, count = gather_for_reshard(mine, 5, placed, lambda _names: tensors)
        if source is None:
            return is_new, problems, count, [], None
        state, _ = load_tensors(source, tensors, strict=False)
        assert torch.equal(tensors["model.all"], torch.arange(6.0))
        values = [float(tensors[f"model.{part}"].unique().item()) for part in parts]
        return is_new, problems, count, values, state["step"]
    finally:
        dist.destroy_process_group()
