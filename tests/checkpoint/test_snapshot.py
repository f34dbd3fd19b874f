"""Snapshots: whole or not there, whatever happens while they are taken."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from support.images import Held
from support.ranks import run_ranks
from wanma.checkpoint.in_memory.in_memory_checkpointer import InMemoryCheckpointer, find_local_checkpoint
from wanma.checkpoint.in_memory.memory_file import HEADER_BYTES, MemoryFileWriter
from wanma.checkpoint.load.reader import load_tensors
from wanma.job.errors import WanmaError
from wanma.job.run.worker import WorkerContext


def tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        "model.weight": torch.full((64, 32), float(value)),
        "model.transposed": (torch.arange(600.0).view(20, 30) * value).t(),
        "model.half": torch.full((1001,), float(value), dtype=torch.bfloat16),
        "model.count": torch.tensor(int(value)),
        "optimizer.empty": torch.empty(0, 4),
    }


def take(snapshots: InMemoryCheckpointer, *steps: int) -> None:
    for step in steps:
        snapshots.start(step, tensors(step), {"step": step}, {"random": step})
        taken = snapshots.wait_for_copy()
        assert taken.step == step


def restored(held: Held, step: int) -> tuple[dict[str, torch.Tensor], Any]:
    found, problems = find_local_checkpoint(held.images(0, held, step), step, 0, 1, [0])
    assert problems == []
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    return into, load_tensors(found.open_source(), into)


def test_a_snapshot_reads_back_bitwise_with_its_state() -> None:
    held = Held(1)
    take(InMemoryCheckpointer(held.images(0), 0, 1, 1), 5)
    into, told = restored(held, 5)
    assert told == ({"step": 5}, {"random": 5})
    for name, tensor in tensors(5).items():
        assert torch.equal(into[name], tensor), name


def test_the_two_images_hold_the_last_two_steps() -> None:
    held = Held(1)
    snapshots = InMemoryCheckpointer(held.images(0), 0, 1, 1)
    for step, expected in [(1, {1}), (2, {1, 2}), (3, {2, 3}), (4, {3, 4})]:
        take(snapshots, step)
        assert held.steps() == expected
    for step in (3, 4):
        into, _ = restored(held, step)
        assert into["model.weight"].unique().tolist() == [step]


def test_what_may_change_at_once_is_copied_before_begin_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    may_write = threading.Event()
    reserve = MemoryFileWriter.reserve

    def reserve_later(self: MemoryFileWriter, rank_manifest_bytes: int) -> None:
        assert may_write.wait(10)
        reserve(self, rank_manifest_bytes)

    monkeypatch.setattr(MemoryFileWriter, "reserve", reserve_later)
    held, content = Held(1), tensors(1.0)
    snapshots = InMemoryCheckpointer(held.images(0), 0, 1, 1)
    snapshots.start(1, content, {}, mutable_names=["model.half"])
    content["model.half"].fill_(9.0)
    may_write.set()
    snapshots.wait_for_copy()
    assert restored(held, 1)[0]["model.half"].unique().tolist() == [1.0]


def test_settling_nothing_is_nothing() -> None:
    held = Held(1)
    assert InMemoryCheckpointer(held.images(0), 0, 1, 1).wait_for_copy() is None


def test_a_snapshot_that_finds_no_memory_says_so_and_leaves_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = Held(1)
    snapshots = InMemoryCheckpointer(held.images(0), 0, 1, 1)
    take(snapshots, 1)

    def none_left(self: MemoryFileWriter, rank_manifest_bytes: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(MemoryFileWriter, "reserve", none_left)
    snapshots.start(2, tensors(2), {})
    with pytest.raises(WanmaError, match="rank 0: Cannot allocate memory"):
        snapshots.wait_for_copy()
    assert held.steps() == {1}
    assert restored(held, 1)[0]["model.count"] == 1


def test_what_is_needed_is_told_until_it_is_there() -> None:
    held = Held(1)
    snapshots = InMemoryCheckpointer(held.images(0), 0, 1, 1)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors().values())
    assert snapshots.required_bytes(tensors()) == 2 * size
    take(snapshots, 1)
    assert snapshots.required_bytes(tensors()) == size
    take(snapshots, 2)
    assert snapshots.required_bytes(tensors()) == 0


@pytest.mark.parametrize("where", ["content", "table"])
def test_killed_in_mid_copy_the_image_counts_for_nothing_and_the_other_is_whole(where: str) -> None:
    held = Held(1)
    victim = multiprocessing.get_context("fork").Process(target=_die_in_mid_copy, args=(held, where))
    victim.start()
    victim.join(60)
    assert victim.exitcode == -signal.SIGKILL
    assert held.steps() == {2}
    into, told = restored(held, 2)
    assert told == ({"step": 2}, {"random": 2})
    for name, tensor in tensors(2).items():
        assert torch.equal(into[name], tensor), name
    _, problems = find_local_checkpoint(held.images(0), 3, 0, 1, [0])
    assert problems == ["the node of rank 0 has no memory file of step 3"]


def _die_in_mid_copy(held: Held, where: str) -> None:
    torch.set_num_threads(1)
    snapshots = InMemoryCheckpointer(held.images(0), 0, 1, 1)
    take(snapshots, 1, 2)
    if where == "content":
        from wanma.checkpoint.in_memory import in_memory_checkpointer

        right, count = in_memory_checkpointer._copy_and_hash, [0]

        def copy(*arguments: Any) -> None:
            count[0] += 1
            if count[0] == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            right(*arguments)

        in_memory_checkpointer._copy_and_hash = copy  # type: ignore[assignment]
    else:
        MemoryFileWriter.finish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, method-assign]
    snapshots.start(3, tensors(3), {})
    snapshots.wait_for_copy()


def test_a_flipped_bit_is_found() -> None:
    held = Held(1)
    take(InMemoryCheckpointer(held.images(0), 0, 1, 1), 1, 2)
    held.flip(0, 2, HEADER_BYTES + 3000)
    _, problems = find_local_checkpoint(held.images(0, held, 2), 2, 0, 1, [0])
    assert problems == ["the memory file of step 2, rank 0, is damaged: its content differs from its hash"]
    assert restored(held, 1)[0]["model.count"] == 1


def test_images_of_two_runs_are_not_put_together() -> None:
    held = Held(2)
    for rank in range(2):
        take(InMemoryCheckpointer(held.images(rank), rank, 2, generation=rank), 4)
    _, problems = find_local_checkpoint(held.images(0, held, 4), 4, 0, 2, [0, 1])
    assert problems == ["the memory files of step 4 come from different generations"]


def test_a_rank_without_an_image_is_named() -> None:
    held = Held(2)
    take(InMemoryCheckpointer(held.images(0), 0, 2, 1), 4)
    _, problems = find_local_checkpoint(held.images(0, held, 4), 4, 0, 1, [0])
    assert problems == ["rank 1 has no complete memory file of step 4"]


def test_other_nodes_ranks_need_no_image_here_where_the_layout_stays() -> None:
    """Two ranks on two nodes: each has what it held."""
    held = Held(2)
    take(InMemoryCheckpointer(held.images(1), 1, 2, 1, node_ranks=[1], layout="a"), 4)
    here = held.images(1, held, 4)
    found, problems = find_local_checkpoint(here, 4, 1, 2, [1], "a")
    assert problems == []
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    assert load_tensors(found.open_source(), into, rank=1, world_size=2) == ({"step": 4}, {"random": 4})
    assert into["model.count"] == 4
    assert find_local_checkpoint(here, 4, 1, 2, [1], "b")[1] == [
        "rank 0 has no complete memory file of step 4"
    ]
    assert find_local_checkpoint(here, 4, 0, 2, [0], "a")[1] == [
        "rank 0 has no complete memory file of step 4"
    ]


LAYOUTS = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "replicated": [Replicate()],
}


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_two_ranks_take_up_on_any_layout_what_two_ranks_left(source: str, target: str) -> None:
    held = Held(2)
    images = [held.images(rank, held, 6) for rank in range(2)]
    assert run_ranks(_spread, 2, (images, source, target), is_reused=True) == ["", ""]
    headers = 2 * 256
    kept = sum(held.heads(rank)[0].content_bytes for rank in range(2))
    assert kept <= (140 + 3) * 4 + headers  # no element twice


def test_one_rank_takes_up_what_two_left() -> None:
    held = Held(2)
    images = [held.images(rank, held, 6) for rank in range(2)]
    run_ranks(_spread, 2, (images, "rows", "rows"), is_reused=True)
    found, problems = find_local_checkpoint(images[0], 6, 0, 1, [0])
    assert problems == []
    into = {"model.matrix": torch.zeros(14, 10), "model.plain": torch.zeros(3)}
    assert load_tensors(found.open_source(), into) == ({"samples": 12}, None)
    assert into["model.matrix"].flatten().tolist() == list(range(140))
    assert into["model.plain"].tolist() == [1, 2, 3]


def _spread(worker: WorkerContext, images: list[Any], source: str, target: str) -> str:
    store = dist.TCPStore(worker.store_host, worker.store_port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=worker.rank, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.arange(140.0).view(14, 10)
        content: dict[str, torch.Tensor] = {
            "model.matrix": distribute_tensor(whole, mesh, LAYOUTS[source]),
            "model.plain": torch.tensor([1.0, 2.0, 3.0]),
        }
        mine = images[worker.rank]
        snapshots = InMemoryCheckpointer(mine, worker.rank, 2, 1, node_ranks=worker.node_ranks)
        snapshots.start(6, content, {"samples": 12}, {"rank": worker.rank})
        snapshots.wait_for_copy()
        dist.barrier()

        found, problems = find_local_checkpoint(mine, 6, worker.rank, 2, worker.node_ranks)
        assert problems == []
        into = {
            "model.matrix": distribute_tensor(torch.zeros(14, 10), mesh, LAYOUTS[target]),
            "model.plain": torch.zeros(3),
        }
        told = load_tensors(found.open_source(), into, rank=worker.rank, world_size=2)
        assert told == ({"samples": 12}, {"rank": worker.rank})
        matrix = into["model.matrix"]
        assert isinstance(matrix, DTensor)
        assert torch.equal(matrix.full_tensor(), whole)
        assert into["model.plain"].tolist() == [1, 2, 3]
        return ""
    finally:
        dist.destroy_process_group()
