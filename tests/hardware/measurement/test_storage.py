"""File systems measured: cold where the kernel drops its cache, and said so where it does not."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from wanma.bench.machine.execution import file_system
from wanma.hardware.measurement.storage_benchmarks import (
    BLOCK_BYTES,
    FILE_BYTES,
    cached_share,
    can_drop_cache,
    storage_cases,
)

MEMORY = Path("/dev/shm")
IN_MEMORY = {"tmpfs", "ramfs"}


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    if not MEMORY.is_dir() or file_system(MEMORY) not in IN_MEMORY:
        pytest.skip("no file system in memory")
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        yield Path(name)


@pytest.fixture
def disk_folder(tmp_path: Path) -> Path:
    if file_system(tmp_path) in IN_MEMORY:
        pytest.skip("temporary files are in memory")
    return tmp_path


def test_a_disk_is_read_cold(disk_folder: Path) -> None:
    found = {name: (sizes, measure(0.01)) for name, sizes, measure in storage_cases(disk_folder)}
    assert found.keys() == {"read_cold", "random_read", "flush", "small_files_write", "small_files_read"}
    assert found["read_cold"][0] == (FILE_BYTES,)
    assert found["random_read"][0][1] == BLOCK_BYTES
    assert all(0 < seconds < 60 for _, seconds in found.values())
    assert list(disk_folder.iterdir()) == [], "nothing is left behind"


def test_a_file_system_in_memory_is_not_called_cold(memory_folder: Path) -> None:
    assert not can_drop_cache(memory_folder)
    names = {name for name, _, measure in storage_cases(memory_folder) if measure(0.001) > 0}
    assert names == {"read_cached", "flush", "small_files_write", "small_files_read"}
    assert list(memory_folder.iterdir()) == []


def test_the_kernel_tells_what_is_cached(disk_folder: Path) -> None:
    with (disk_folder / "file").open("w+b") as file:
        file.write(b"x" * (1 << 20))
        file.flush()
        assert cached_share(file.fileno(), 1 << 20) == 1.0
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert cached_share(file.fileno(), 1 << 20) == 0.0
        os.pread(file.fileno(), 1, 0)
        assert 0 < cached_share(file.fileno(), 1 << 20) <= 1
