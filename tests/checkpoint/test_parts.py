"""A copy in parts on the machines that held it, and the checkpoint that they make together."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from support.images import Held
from wanma.checkpoint.in_memory import flushed_parts as module
from wanma.checkpoint.in_memory.flush import flush_to_disk
from wanma.checkpoint.in_memory.flushed_parts import (
    InMemoryCheckpointKey,
    list_flushed_parts,
    remove_flushed_parts,
    write_flushed_part,
)
from wanma.checkpoint.in_memory.in_memory_checkpointer import InMemoryCheckpointer
from wanma.checkpoint.load.reader import load_full_tensors
from wanma.job.errors import WanmaError

NODES = [[0, 1], [2, 3]]


@pytest.fixture
def held() -> Held:
    """Two machines of two ranks each; each machine holds a tensor of its own, and one that both hold."""
    held = Held(4)
    for node in NODES:
        for rank in node:
            snapshots = InMemoryCheckpointer(held.images(rank), rank, 4, 1, node_ranks=node)
            own = torch.full((1000,), float(node[0]))
            tensors = {f"model.{node[0]}": own, "model.all": torch.arange(64.0)}
            snapshots.start(7, tensors, {"samples": 8}, {"random": rank})
            snapshots.wait_for_copy()
            snapshots.close()
    return held


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Fallback folders of two nodes."""
    places = [tmp_path / "one" / "place", tmp_path / "two" / "place"]
    monkeypatch.setattr(module, "fallback_folders", lambda _folder: [Path("/dev/full/no"), *places[:1]])
    return places


def paths(held: Held, ranks: list[int]) -> dict[int, str]:
    return {rank: held.images(rank).own_paths[0] for rank in ranks}


def test_the_parts_of_all_machines_make_the_checkpoint(
    held: Held, places: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"
    found = []
    for node, place in zip(NODES, places, strict=True):
        monkeypatch.setattr(
            module, "fallback_folders", lambda _folder, place=place: [Path("/dev/full/no"), place]
        )
        written = write_flushed_part(folder, paths(held, node))
        (place / "part-step-00000007-1-00009.writing").mkdir()
        [part] = list_flushed_parts(folder)
        assert (part.path, part.checkpoint_key) == (written, InMemoryCheckpointKey(7, 1, 4))
        assert sorted(part.memory_files) == node
        found.append({rank: str(path) for rank, path in part.memory_files.items()})
    other = threading.Thread(
        target=lambda: flush_to_disk(folder, found[1], 4, "1-parts", time.monotonic() + 20)
    )
    other.start()
    committed = flush_to_disk(folder, found[0], 4, "1-parts", time.monotonic() + 20)
    other.join()
    assert committed is not None
    state = load_full_tensors(committed)
    assert {float(state[f"model.{first}"].mean()) for first in (0, 2)} == {0.0, 2.0}
    assert torch.equal(state["model.all"], torch.arange(64.0))
    for place in places:
        monkeypatch.setattr(module, "fallback_folders", lambda _folder, place=place: [place])
        remove_flushed_parts(folder, 6)
        assert len(list_flushed_parts(folder)) == 1, "it is newer"
        assert len(list(place.iterdir())) == 1, "what was half written is gone"
        remove_flushed_parts(folder, 7)
        assert not place.exists()


def test_a_part_that_finds_no_room_leaves_nothing_and_says_where_it_was_tried(
    held: Held, places: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *_content: memoryview) -> str:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_file", full)
    with pytest.raises(WanmaError, match=r"step 7, ranks 0, 1, .*No space left") as told:
        write_flushed_part(tmp_path / "checkpoints", paths(held, [0, 1]))
    assert str(places[0]) in str(told.value)
    assert list(places[0].iterdir()) == []


def test_a_damaged_image_is_no_part(held: Held, places: list[Path], tmp_path: Path) -> None:
    path = Path(held.images(0).own_paths[0])
    content = bytearray(path.read_bytes())
    content[5000] ^= 8
    path.write_bytes(content)
    with pytest.raises(WanmaError, match="checkpoint of rank 0 is damaged"):
        write_flushed_part(tmp_path / "checkpoints", paths(held, [0, 1]))
    assert not places[0].exists() or not list_flushed_parts(tmp_path / "checkpoints")
