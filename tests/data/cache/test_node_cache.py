"""Node cache: one download for all, at any limit, through damage, a full disk and killed processes."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import pickle
import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.cache_reader import Reader, cache_readers
from support.faulty_proxy import SLOW_DOWN, Fault
from support.s3_server import S3Server
from wanma.data.cache import block_store
from wanma.data.cache.block_store import TRAILER_BYTES
from wanma.data.cache.node_cache import NodeCache
from wanma.data.stores.byte_source import MappedFile
from wanma.data.stores.listing import StoredFile, list_files

BLOCK = 100_000
CONTENT = random.Random(4).randbytes(950_000)
BLOCKS = 10
ROOMY = 100 << 20


@pytest.fixture
def file(s3: S3Server) -> StoredFile:
    (file,) = list_files([s3.put("shard.bin", CONTENT)], "data.text")
    return file


def cached_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "blocks-1").iterdir())


def test_ranges_are_equal_and_each_block_leaves_the_store_once(
    s3: S3Server, file: StoredFile, tmp_path: Path
) -> None:
    cache = NodeCache(tmp_path, ROOMY, BLOCK)
    source = cache.open(file)
    assert cache.held_bytes([file]) == 0
    ranges = [(250_000, 450_001), (0, 3), (5, 5), (949_990, 960_000), (260_000, 260_001)]
    assert source.read_ranges(ranges) == [CONTENT[start:end] for start, end in ranges]
    assert len(s3.proxy.ranged_requests) == 5, "of ten blocks"
    assert cache.held_bytes([file]) == 4 * BLOCK + 50_000
    assert cache.held_bytes([replace(file, version="another")]) == 0
    assert source.read(0, len(CONTENT)) == CONTENT
    assert len(s3.proxy.ranged_requests) == BLOCKS
    assert cache.traffic["cache_blocks", "miss"] == BLOCKS
    assert (source.url, source.size, source.version) == (file.url, file.size, file.version)


def test_the_next_run_finds_it_and_another_version_does_not(
    s3: S3Server, file: StoredFile, tmp_path: Path
) -> None:
    NodeCache(tmp_path, ROOMY, BLOCK).open(file).read(0, len(CONTENT))
    s3.proxy.requests.clear()
    cache = NodeCache(tmp_path, ROOMY, BLOCK)
    assert cache.open(file).read(0, len(CONTENT)) == CONTENT
    assert (s3.proxy.ranged_requests, cache.traffic["cache_blocks", "hit"]) == ([], BLOCKS)
    s3.put("shard.bin", CONTENT[::-1])
    (changed,) = list_files([file.url], "data.text")
    assert cache.open(changed).read(0, 100) == CONTENT[::-1][:100]


def test_threads_share_downloads(s3: S3Server, file: StoredFile, tmp_path: Path) -> None:
    s3.proxy.delay_seconds = 0.02
    source, found = NodeCache(tmp_path, ROOMY, BLOCK).open(file), []
    threads = [threading.Thread(target=lambda: found.append(source.read(0, len(CONTENT)))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [CONTENT] * 6
    assert len(s3.proxy.ranged_requests) == BLOCKS


@pytest.mark.parametrize("blocks", [0, 1, 2, 5])
def test_a_limit_below_the_size_of_a_shard_is_held_and_read_through(
    s3: S3Server, file: StoredFile, tmp_path: Path, blocks: int
) -> None:
    limit = blocks * (BLOCK + TRAILER_BYTES) + 10
    cache = NodeCache(tmp_path, limit, BLOCK)
    source = cache.open(file)
    for _ in range(2):
        assert source.read(0, len(CONTENT)) == CONTENT
        assert cached_size(tmp_path) <= limit
    assert source.read_ranges([(0, 10), (500_000, 500_010)]) == [CONTENT[:10], CONTENT[500_000:500_010]]
    assert (cache.traffic["cache_blocks", "miss"] > 0) == (blocks > 0)


def test_a_damaged_block_is_fetched_again(s3: S3Server, file: StoredFile, tmp_path: Path) -> None:
    NodeCache(tmp_path, ROOMY, BLOCK).open(file).read(0, len(CONTENT))
    victim = min((tmp_path / "blocks-1").iterdir())
    with victim.open("r+b") as stream:
        stream.seek(777)
        stream.write(b"\0\0\0\0")
    s3.proxy.requests.clear()
    cache = NodeCache(tmp_path, ROOMY, BLOCK)
    assert cache.open(file).read(0, len(CONTENT)) == CONTENT
    assert len(s3.proxy.ranged_requests) == 1


def test_a_full_disk_is_read_past_with_one_warning(
    s3: S3Server,
    file: StoredFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(block_store, "_allocate", refuse)
    cache = NodeCache(tmp_path, ROOMY, BLOCK)
    with caplog.at_level(logging.WARNING):
        assert cache.open(file).read(0, len(CONTENT)) == CONTENT
        assert cache.open(file).read(5, 10) == CONTENT[5:10]
    assert [record.getMessage() for record in caplog.records] == [
        f"the node cache in {tmp_path} cannot be used (No space left on device); data is read from the store "
        "itself"
    ]
    assert not cache.traffic


@pytest.mark.root
def test_a_real_disk_that_is_full_is_read_past(s3: S3Server, file: StoredFile, tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", tmp_path], check=True)
    try:
        cache = NodeCache(tmp_path, ROOMY, BLOCK)
        assert cache.open(file).read(0, len(CONTENT)) == CONTENT
        assert 0 < cache.traffic["cache_blocks", "miss"] < BLOCKS
        assert not list((tmp_path / "blocks-1").glob("*.part"))
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_a_local_file_is_not_copied(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"local")
    (file,) = list_files([str(tmp_path / "x")], "data.text")
    source = NodeCache(tmp_path / "cache", ROOMY).open(file)
    assert isinstance(source, MappedFile)
    assert source.read(1, 3) == b"oc"


def test_a_cache_may_be_pickled(s3: S3Server, file: StoredFile, tmp_path: Path) -> None:
    source = NodeCache(tmp_path, ROOMY, BLOCK).open(file)
    assert pickle.loads(pickle.dumps(source)).read(1, 9) == CONTENT[1:9]


# Real processes from here on.


StartReaders = Callable[..., list[Reader]]


@pytest.fixture
def start_readers(s3: S3Server, tmp_path: Path) -> Iterator[StartReaders]:
    with cache_readers(tmp_path / "results") as readers:

        def start(count: int, folder: Path, limit: int, urls: list[str], first_seed: int = 0) -> list[Reader]:
            seeds = range(first_seed, first_seed + count)
            return [readers.start(folder, limit, BLOCK, seed, urls) for seed in seeds]

        yield start


def results(readers: list[Reader]) -> list[dict[str, Any]]:
    return [reader.result() for reader in readers]


def put_shards(s3: S3Server, count: int) -> tuple[list[str], list[str]]:
    contents = [random.Random(100 + number).randbytes(4 * BLOCK + 1000 * number) for number in range(count)]
    urls = [s3.put(f"shards/{number}.bin", content) for number, content in enumerate(contents)]
    s3.proxy.requests.clear()
    return urls, [hashlib.sha256(content).hexdigest() for content in contents]


def requested(s3: S3Server) -> Counter[tuple[str, str]]:
    """Number of requests of each (file, range)."""
    ranges: Counter[tuple[str, str]] = Counter()
    for request in s3.proxy.ranged_requests:
        ranges[request.path, request.headers.get("Range", request.headers.get("range", ""))] += 1
    return ranges


def test_four_processes_download_each_block_once(
    s3: S3Server, tmp_path: Path, start_readers: StartReaders
) -> None:
    urls, hashes = put_shards(s3, 3)
    s3.proxy.fault = lambda request: SLOW_DOWN if request.number % 7 == 0 and request.is_ranged else None
    found = results(start_readers(4, tmp_path, ROOMY, urls))
    assert [one["hashes"] for one in found] == [hashes] * 4
    failed = sum(request.number % 7 == 0 for request in s3.proxy.ranged_requests)
    assert sum(one["downloads"] for one in found) == 4 + 5 + 5
    assert len(s3.proxy.ranged_requests) == 4 + 5 + 5 + failed
    assert sum(one["requests"] for one in found) == 4 + 5 + 5 + failed


def test_four_processes_share_a_cache_smaller_than_one_shard(
    s3: S3Server, tmp_path: Path, start_readers: StartReaders
) -> None:
    urls, hashes = put_shards(s3, 2)
    limit = 2 * (BLOCK + TRAILER_BYTES)
    found = results(start_readers(4, tmp_path, limit, urls))
    assert [one["hashes"] for one in found] == [hashes] * 4
    assert cached_size(tmp_path) <= limit


@pytest.mark.parametrize("limit_blocks", [1000, pytest.param(6, marks=pytest.mark.full)])
def test_processes_killed_at_any_point_leave_nothing_in_the_way(
    s3: S3Server, tmp_path: Path, limit_blocks: int, start_readers: StartReaders
) -> None:
    urls, hashes = put_shards(s3, 3)
    s3.proxy.fault = lambda request: Fault(pause_seconds=0.01) if request.is_ranged else None
    limit = limit_blocks * (BLOCK + TRAILER_BYTES)
    draws, kills = random.Random(limit_blocks), 0
    for round_number in range(4):
        readers = start_readers(3, tmp_path, limit, urls, 10 * round_number)
        started = time.monotonic() + 60
        while len(s3.proxy.ranged_requests) <= round_number * 2 and time.monotonic() < started:
            time.sleep(0.002)  # until they download
            if not any(reader.is_alive() for reader in readers):
                break
        for reader in readers:
            time.sleep(draws.uniform(0, 0.05))
            kills += reader.is_alive()
            reader.kill()
    assert kills >= 3
    found = results(start_readers(4, tmp_path, limit, urls, 1000))
    assert [one["hashes"] for one in found] == [hashes] * 4
    assert cached_size(tmp_path) <= limit
    if limit_blocks == 1000:
        repeated = sum(count - 1 for count in requested(s3).values())
        assert repeated <= kills * 16, "only downloads that a kill interrupted are repeated"
        assert len(requested(s3)) == 14
        assert int((tmp_path / "usage").read_text()) >= cached_size(tmp_path)
