"""A checkpoint made of images by processes that know no torch: the one that the ranks would have saved."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.images import Held
from wanma.checkpoint.in_memory.flush import assign_tensors, flush_to_disk
from wanma.checkpoint.in_memory.in_memory_checkpointer import InMemoryCheckpointer
from wanma.checkpoint.load.reader import load_full_tensors
from wanma.checkpoint.load.verification import find_defects
from wanma.checkpoint.save.checkpointer import Checkpointer
from wanma.checkpoint.store.checkpoint_folder import list_committed
from wanma.job.errors import WanmaError


def tensors(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model.weight": torch.randn(64, 32, generator=generator),
        "model.half": torch.randn(1001, generator=generator).bfloat16(),
        "model.bias": torch.randn(7, generator=generator),
        "optimizer.step": torch.tensor(float(step)),
    }


STATE = {"samples": 8, "best_loss": None}


def snapshot(held: Held, step: int, nodes: list[list[int]]) -> None:
    """Replicas on some nodes: each node has all tensors once."""
    ranks = [rank for node in nodes for rank in node]
    for node in nodes:
        for rank in node:
            snapshots = InMemoryCheckpointer(held.images(rank), rank, len(ranks), 1, node_ranks=node)
            snapshots.start(step, tensors(step), STATE, {"random": rank})
            snapshots.wait_for_copy()
            snapshots.close()


def paths(held: Held, ranks: list[int]) -> dict[int, str]:
    return {rank: held.images(rank).own_paths[0] for rank in ranks}


def write(folder: Path, held: Held, node: list[int], world_size: int, seconds: float = 20) -> Path | None:
    return flush_to_disk(folder, paths(held, node), world_size, "1-rescue", time.monotonic() + seconds)


def test_the_images_of_one_node_become_the_checkpoint_that_its_ranks_would_have_saved(tmp_path: Path) -> None:
    held = Held(2)
    snapshot(held, 5, [[0, 1]])
    path = write(tmp_path / "rescued", held, [0, 1], 2)
    assert path == tmp_path / "rescued" / "step-00000005"
    assert find_defects(path) == []
    found = load_full_tensors(path)
    assert found.keys() == tensors(5).keys()
    for name, tensor in tensors(5).items():
        assert torch.equal(found[name], tensor), name
    saved = [Checkpointer(tmp_path / "saved", rank, 2, generation=1) for rank in (0, 1)]
    for rank, checkpointer in enumerate(saved):
        checkpointer.save(5, tensors(5), STATE, rank_state={"random": rank})
    for checkpointer in saved:
        checkpointer.close()
    for one in (tmp_path / "saved" / "step-00000005").iterdir():
        assert (path / one.name).read_bytes() == one.read_bytes(), one.name


def test_what_two_nodes_hold_both_is_written_once(tmp_path: Path) -> None:
    held, nodes = Held(3), [[0, 1], [2]]
    snapshot(held, 5, nodes)
    results: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda node=node: results.update({node[0]: write(tmp_path, held, node, 3)}))
        for node in nodes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: tmp_path / "step-00000005", 2: None}
    assert find_defects(results[0]) == []
    found = load_full_tensors(results[0])
    for name, tensor in tensors(5).items():
        assert torch.equal(found[name], tensor), name
    contents = sum(tensor.numel() * tensor.element_size() for tensor in tensors(5).values())
    files = sum(file.stat().st_size for file in results[0].glob("*.safetensors"))
    assert contents < files < contents + 2000, "once, and the headers"


def test_a_damaged_image_is_refused_and_nothing_is_committed(tmp_path: Path) -> None:
    held = Held(1)
    snapshot(held, 5, [[0]])
    with Path(held.images(0).own_paths[0]).open("r+b") as image:
        image.seek(5000)
        byte = image.read(1)
        image.seek(5000)
        image.write(bytes([byte[0] ^ 1]))
    with pytest.raises(WanmaError, match="checkpoint of rank 0 is damaged"):
        write(tmp_path, held, [0], 1)
    assert list_committed(tmp_path) == []


def test_a_node_that_does_not_come_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    held = Held(2)
    snapshot(held, 5, [[0], [1]])
    with pytest.raises(WanmaError, match=r"rank 1 .* within 0\.\d* s"):
        write(tmp_path, held, [0], 2, seconds=0.3)
    assert list_committed(tmp_path) == []


def test_a_checkpoint_that_is_as_new_is_taken_as_it_is(tmp_path: Path) -> None:
    held = Held(1)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(6, tensors(6), STATE)
    snapshot(held, 5, [[0]])
    assert write(tmp_path, held, [0], 1) == tmp_path / "step-00000006"
    assert [step for step, _ in list_committed(tmp_path)] == [6]


SHAPES = st.lists(st.integers(1, 9), max_size=2).map(tuple)


@given(st.dictionaries(st.text("abc", min_size=1), st.tuples(SHAPES, st.sets(st.integers(0, 4), min_size=1))))
def test_every_part_is_written_by_one_of_its_holders_and_loads_are_even(
    held: dict[str, tuple[tuple[int, ...], set[int]]],
) -> None:
    tables = [
        {
            "rank": rank,
            "tensors": {
                name: ["F32", shape, [0] * len(shape), shape]
                for name, (shape, holders) in held.items()
                if rank in holders
            },
        }
        for rank in range(5)
    ]
    shares = assign_tensors(tables)
    assert sorted(name for share in shares.values() for name in share) == sorted(held)
    for rank, share in shares.items():
        assert all(rank in held[name][1] for name in share)
    sizes = {name: 4 * math.prod(shape) for name, (shape, _) in held.items()}
    load = {rank: sum(sizes[name] for name in share) for rank, share in shares.items()}
    for rank, share in shares.items():
        shared = [name for name in share if len(held[name][1]) > 1]
        if shared:
            last = max(shared, key=lambda name: (-sizes[name], name))
            for other in held[last][1]:
                assert load[rank] - sizes[last] <= load[other], "the holder that had least took it"
