"""Folder of blocks: limit, use, damage, and what the dead leave behind."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from pathlib import Path

from wanma.data.cache.block_store import TRAILER_BYTES, BlockStore
from wanma.data.stores.file_locks import exclusive_lock

SIZE = 1000
WHOLE = SIZE + TRAILER_BYTES


def store(folder: Path, blocks: int = 4) -> BlockStore:
    return BlockStore(folder, blocks * WHOLE)


def put(blocks: BlockStore, name: str, content: bytes | None = None) -> bool:
    content = name.encode().ljust(SIZE, b".") if content is None else content
    reservation = blocks.reserve(name, len(content), search=True)
    if reservation is not None:
        reservation.write(content)
    return reservation is not None


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "blocks-1").iterdir()}


def size_on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "blocks-1").iterdir())


def age(folder: Path, name: str, seconds: int) -> None:
    moment = time.time() - seconds
    os.utime(folder / "blocks-1" / name, (moment, moment))


def test_a_block_is_read_as_it_was_written(tmp_path: Path) -> None:
    blocks = store(tmp_path)
    assert blocks.map("a") is None
    assert put(blocks, "a", b"content")
    assert put(blocks, "empty", b"")
    assert blocks.map("a") == b"content"
    assert store(tmp_path).map("empty") == b""


def test_the_least_recently_used_blocks_go_and_the_limit_holds(tmp_path: Path) -> None:
    blocks = store(tmp_path)
    for number, name in enumerate("abcd"):
        assert put(blocks, name)
        age(tmp_path, name, 100 - number)
    assert blocks.map("a") is not None  # used now
    assert put(blocks, "e")
    assert names(tmp_path) & {"a", "b", "e"} == {"a", "e"}
    assert size_on_disk(tmp_path) <= blocks.limit_bytes


def test_a_block_in_use_is_not_evicted(tmp_path: Path) -> None:
    blocks = store(tmp_path, 2)
    assert put(blocks, "a")
    view = blocks.map("a")
    age(tmp_path, "a", 100)
    assert put(blocks, "b")
    assert put(blocks, "c")
    assert names(tmp_path) == {"a", "c"}
    assert view is not None
    assert view[:1] == b"a"
    del view
    age(tmp_path, "a", 100)
    assert put(blocks, "d")
    assert "a" not in names(tmp_path)


def test_no_room_is_an_answer_and_not_a_wait(tmp_path: Path) -> None:
    blocks = store(tmp_path, 2)
    assert put(blocks, "a")
    assert put(blocks, "b")
    views = [blocks.map("a"), blocks.map("b")]
    assert not put(blocks, "c")
    assert blocks.reserve("big", 3 * SIZE) is None
    assert [view[:1] for view in views if view is not None] == [b"a", b"b"]


def test_a_damaged_block_is_removed(tmp_path: Path) -> None:
    blocks = store(tmp_path)
    for name in ("a", "b", "c"):
        assert put(blocks, name)
    folder = tmp_path / "blocks-1"
    with (folder / "a").open("r+b") as file:
        file.seek(500)
        file.write(b"x")
    (folder / "b").write_bytes((folder / "b").read_bytes()[:10])
    (folder / "c").rename(folder / "d")  # the content of another block
    assert [blocks.map(name) for name in "abd"] == [None] * 3
    assert names(tmp_path) == set()
    assert int((tmp_path / "usage").read_text()) < 2 * WHOLE, "b lost its end to another hand"


def test_space_that_a_dead_writer_took_comes_back(tmp_path: Path) -> None:
    blocks = store(tmp_path, 2)
    assert blocks.reserve("dead", SIZE) is not None  # never written
    assert blocks.reserve("dead too", SIZE) is not None
    assert size_on_disk(tmp_path) == 2 * WHOLE
    assert put(blocks, "a")
    assert put(blocks, "dead")
    assert names(tmp_path) == {"a", "dead"}


def test_a_writer_that_lives_keeps_its_space(tmp_path: Path) -> None:
    blocks = store(tmp_path, 1)
    with blocks.lock("a", 0) as lock:
        assert lock is not None
        reservation = blocks.reserve("a", SIZE)
        assert reservation is not None
        assert not put(store(tmp_path, 1), "b")
        reservation.write(b"a" * SIZE)
    assert names(tmp_path) == {"a"}


def test_space_that_is_given_back_is_free(tmp_path: Path) -> None:
    blocks = store(tmp_path, 1)
    reservation = blocks.reserve("a", SIZE)
    assert reservation is not None
    blocks.release(reservation)
    assert (names(tmp_path), int((tmp_path / "usage").read_text())) == (set(), 0)


def test_a_lost_count_is_made_again_from_the_files(tmp_path: Path) -> None:
    blocks = store(tmp_path)
    assert put(blocks, "a")
    (tmp_path / "usage").write_text("damaged")
    assert put(blocks, "b")
    assert int((tmp_path / "usage").read_text()) == 2 * WHOLE


def test_a_lock_excludes_threads_and_is_waited_for_no_longer_than_said(tmp_path: Path) -> None:
    order = []
    with exclusive_lock(tmp_path / "lock", 0) as lock:
        assert lock is not None
        with exclusive_lock(tmp_path / "lock", 0.05) as other:
            assert other is None

        def wait() -> None:
            with exclusive_lock(tmp_path / "lock", 30) as late:
                order.append("late" if late is not None else "never")

        thread = threading.Thread(target=wait)
        thread.start()
        order.append("first")
    thread.join()
    assert order == ["first", "late"]


def test_a_lock_is_dropped_though_a_forked_process_has_the_file(tmp_path: Path) -> None:
    with exclusive_lock(tmp_path / "lock", 0) as lock:
        assert lock is not None
        copy = os.dup(lock)  # as in a forked process
    with exclusive_lock(tmp_path / "lock", 0) as again:
        assert again is not None
    fcntl.flock(copy, fcntl.LOCK_UN)
    os.close(copy)
