"""Saves of ranks that do not share rank 0's folder: it writes their parts."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from wanma.checkpoint.load.reader import find_defects, load_full_tensors
from wanma.checkpoint.save import relay
from wanma.checkpoint.save.checkpointer import Checkpointer, CheckpointRelay, SaveResult
from wanma.checkpoint.save.relay import StoreChannel

TENSORS = [{"a": torch.arange(1000.0)}, {"b": torch.ones(3, 5)}, {"c": torch.full((7,), 2.5)}]


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


def checkpointers(server: TCPStore, folders: list[Path], seconds: float = 60) -> list[Checkpointer]:
    """Return one for each rank; ranks without rank 0's folder send their parts."""
    senders = tuple(rank for rank, folder in enumerate(folders) if folder != folders[0])
    made = []
    for rank, folder in enumerate(folders):
        store = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=60))
        made.append(
            Checkpointer(
                folder,
                rank,
                len(folders),
                replicas=[rank],
                deadline_seconds=seconds,
                relay=CheckpointRelay(StoreChannel(PrefixStore("test", store)), senders),
            )
        )
    return made


def save(made: list[Checkpointer], step: int) -> list[SaveResult]:
    for rank, one in enumerate(made):
        one.save(step, TENSORS[rank], {"step": step}, rank_state={"rank": rank})
    return [result for one in made for result in one.wait()]


def test_rank_0_writes_the_parts_of_ranks_on_other_nodes(
    server: TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "CHUNK_BYTES", 64)  # more chunks than are sent ahead
    made = checkpointers(server, [tmp_path / "one", tmp_path / "one", tmp_path / "two"])
    for step in (1, 2):
        results = save(made, step)
        assert [(result.error, result.path and result.path.name) for result in results] == [
            (None, f"step-{step:08d}")
        ] * 3
    path = tmp_path / "one" / "step-00000002"
    assert find_defects(path) == []
    assert {name: value.tolist() for name, value in load_full_tensors(path).items()} == {
        name: value.tolist() for tensors in TENSORS for name, value in tensors.items()
    }
    assert not (tmp_path / "two").exists()


def test_a_rank_that_cannot_save_ends_the_save_of_all(server: TCPStore, tmp_path: Path) -> None:
    made = checkpointers(server, [tmp_path / "one", tmp_path / "two"])
    made[0].save(1, TENSORS[0], {"step": 1})
    with pytest.raises(Exception, match="reserves this name"):
        made[1].save(1, {"__metadata__": torch.ones(1)}, {"step": 1})
    (result,) = made[0].wait()
    assert "rank 1: a tensor cannot be named" in result.error.message
    assert [one.error for one in save(made, 2)] == [None, None]
    assert [path.name for path in (tmp_path / "one").glob("step-*")] == ["step-00000002"]


def test_a_full_disk_of_rank_0_is_told_to_the_others(
    server: TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = checkpointers(server, [tmp_path / "one", tmp_path / "two"])

    def refuse(*_: object, **__: object) -> str:
        raise OSError(28, "No space left on device", "rank-00000.safetensors")

    monkeypatch.setattr("wanma.checkpoint.save.checkpointer.write_file", refuse)
    for result in save(made, 1):
        assert "rank 0: No space left on device" in result.error.message


def test_a_silent_rank_is_named_after_the_deadline(server: TCPStore, tmp_path: Path) -> None:
    made = checkpointers(server, [tmp_path / "one", tmp_path / "two"], seconds=0.5)
    made[0].save(1, TENSORS[0], {"step": 1})
    (result,) = made[0].wait()
    assert "rank 1 did not send its part" in result.error.message
    assert "shared file system" in result.error.hint


def test_bytes_of_any_size_arrive(server: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "CHUNK_BYTES", 16)
    ends = [
        StoreChannel(TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=60)))
        for _ in range(2)
    ]
    for size in (0, 1, 16, 17, 1000):
        content = bytes(number % 251 for number in range(size))
        sender = threading.Thread(target=ends[0].send, args=(f"size-{size}", memoryview(content), 30.0))
        sender.start()
        assert b"".join(ends[1].receive(f"size-{size}", size, 30.0)) == content
        sender.join()
