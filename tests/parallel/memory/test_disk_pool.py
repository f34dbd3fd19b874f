"""Memory on disk: it keeps what is written, leaves nothing behind, and says so when the disk is full."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from support.command import small_disk as mounted_disk
from wanma.job.errors import WanmaError
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.job import Job
from wanma.parallel.memory.disk_pool import DiskPool, open_disk_pool


def test_tensors_keep_their_values_when_their_memory_is_let_go(tmp_path: Path) -> None:
    with DiskPool(tmp_path / "scratch") as scratch:
        large, small = scratch.allocate(64 << 20), scratch.empty_like(torch.ones(3, 5, dtype=torch.float64))
        large.fill_(7)
        small.copy_(torch.arange(15).view(3, 5))
        full = psutil.Process().memory_info().rss
        scratch.release_pages()
        assert psutil.Process().memory_info().rss < full - (60 << 20)
        assert int(large.min()) == int(large.max()) == 7
        assert small.shape == (3, 5)
        assert torch.equal(small, torch.arange(15.0, dtype=torch.float64).view(3, 5))


def test_no_file_has_a_name_and_the_folder_goes_with_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    with DiskPool(folder) as scratch:
        assert not folder.exists()
        kept = scratch.allocate(1000).fill_(3)
        assert folder.exists()
        assert list(folder.iterdir()) == []
    assert not folder.exists()
    assert int(kept.sum()) == 3000  # who still has a tensor still has its memory


def test_what_is_given_back_is_lent_again(tmp_path: Path) -> None:
    with DiskPool(tmp_path) as scratch:
        first = scratch.acquire(5000)
        other = scratch.acquire(5000)
        assert first.data_ptr() != other.data_ptr()
        scratch.release(first)
        assert scratch.acquire(6000).data_ptr() != first.data_ptr()
        assert scratch.acquire(5000).data_ptr() == first.data_ptr()


def test_many_tensors_take_few_files(tmp_path: Path) -> None:
    with DiskPool(tmp_path) as scratch:
        tensors = [scratch.allocate(100_000) for _ in range(200)]
        for number, tensor in enumerate(tensors):
            tensor.fill_(number)
        assert [int(tensor[99_999]) for tensor in tensors] == list(range(200))
        assert len(scratch._files) < 10
        assert 20_000_000 <= scratch.reserved_bytes <= 2 * 200 * 102_400


def test_a_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with DiskPool(tmp_path / "scratch") as scratch:
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(WanmaError, match=r"5\.0 MiB to .*scratch.*No space left") as error:
            scratch.allocate(5 << 20)
        assert "cluster.scratch" in error.value.hint


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted_disk(tmp_path / "disk", "4m") as folder:
        yield folder


@pytest.mark.root
def test_a_disk_that_fills_up_does_not_kill_the_process(small_disk: Path) -> None:
    with DiskPool(small_disk / "scratch") as scratch:
        first = scratch.allocate(2 << 20).fill_(1)
        with pytest.raises(WanmaError, match="No space left"):
            scratch.allocate(3 << 20)
        assert int(first.sum()) == 2 << 20
        del first


def test_the_job_may_name_another_folder(tmp_path: Path) -> None:
    worker = WorkerContext.single_process(tmp_path / "run")
    model = {"preset": "gpt-1m"}
    assert open_disk_pool(Job.model_validate({"model": model}), worker).folder == tmp_path / "run" / "scratch"
    elsewhere = Job.model_validate({"model": model, "cluster": {"scratch": str(tmp_path / "fast")}})
    assert open_disk_pool(elsewhere, worker).folder == tmp_path / "fast"
