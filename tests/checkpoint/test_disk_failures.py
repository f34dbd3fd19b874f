"""Real failures of disks and permissions: the kernel refuses, and the checkpoint before stays whole."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.command import small_disk as mounted_disk
from support.ranks import run_ranks
from wanma.checkpoint.load.reader import find_newest_valid, load_full_tensors
from wanma.checkpoint.load.verification import find_defects
from wanma.checkpoint.remote.remote_checkpoints import RemoteCheckpoints
from wanma.checkpoint.remote.remote_storage import RemoteStorage
from wanma.checkpoint.save.checkpointer import Checkpointer
from wanma.job.errors import WanmaError
from wanma.job.retry import RetryPolicy
from wanma.job.run.worker import WorkerContext


def save(folder: Path, step: int, elements: int = 1000) -> None:
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(step, {"w": torch.full((elements,), float(step))}, {"step": step})


def save_in_trouble(folder: Path, trouble: str) -> str:
    """Path and error of a save in a process of its own."""
    (told,) = run_ranks(_save_in_trouble, 1, (folder, trouble))
    return str(told)


def _save_in_trouble(worker: WorkerContext, folder: Path, trouble: str) -> str:
    with Checkpointer(folder) as checkpointer:
        if trouble == "large":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
        else:
            os.setuid(65534)
        checkpointer.save(2, {"w": torch.full((1000,), 2.0)}, {"step": 2})
        (result,) = checkpointer.wait()
        return f"{result.path} {result.error}"


def require_first_whole(folder: Path) -> None:
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-00000001"]
    assert find_newest_valid(folder) == folder / "step-00000001"
    assert load_full_tensors(folder / "step-00000001")["w"].unique().tolist() == [1.0]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted_disk(tmp_path / "disk", "1m") as folder:
        yield folder


def test_a_file_that_may_not_grow_fails_the_save_alone(tmp_path: Path) -> None:
    save(tmp_path, 1)
    told = save_in_trouble(tmp_path, "large")
    assert told.startswith("None the checkpoint of step 2 was not saved: rank 0: File too large")
    assert "earlier checkpoints are unchanged" in told
    require_first_whole(tmp_path)


@pytest.mark.root
def test_a_folder_that_may_not_be_written_to_fails_the_save_alone(tmp_path: Path) -> None:
    """The process loses its rights between two saves, as when a mount's owner changes them."""
    save(tmp_path, 1)
    for folder in (tmp_path, *list(tmp_path.parents)[:-2]):
        folder.chmod(0o755)
    told = save_in_trouble(tmp_path, "no rights")
    assert told.startswith("None the checkpoint of step 2 was not saved: rank 0: Permission denied")
    assert "check its permissions" in told
    require_first_whole(tmp_path)


@pytest.mark.root
def test_a_disk_that_turns_read_only_fails_the_save_alone(small_disk: Path) -> None:
    save(small_disk, 1)
    checkpointer = Checkpointer(small_disk)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    checkpointer.save(2, {"w": torch.zeros(1000)}, {})
    (result,) = checkpointer.wait()
    assert "Read-only file system" in str(result.error)
    require_first_whole(small_disk)


@pytest.mark.root
def test_a_full_disk_at_the_other_end_fails_the_upload_alone(tmp_path: Path, small_disk: Path) -> None:
    save(tmp_path / "here", 1)
    save(tmp_path / "here", 2, elements=400_000)
    remote = RemoteCheckpoints(RemoteStorage(f"file://{small_disk}", RetryPolicy(max_attempts=1)))
    remote.upload(tmp_path / "here" / "step-00000001", 1)
    with pytest.raises(WanmaError, match="No space left on device"):
        remote.upload(tmp_path / "here" / "step-00000002", 2)
    assert find_defects(tmp_path / "here" / "step-00000002") == []
    told: list[str] = []
    path = remote.download_newest_valid(tmp_path / "back", told.append)
    assert path == tmp_path / "back" / "step-00000001"
    assert "was not uploaded completely" in told[0]


@pytest.mark.root
def test_a_full_disk_at_this_end_fails_the_download_and_leaves_what_is_there(
    tmp_path: Path, small_disk: Path
) -> None:
    save(tmp_path / "here", 2, elements=400_000)
    remote = RemoteCheckpoints(RemoteStorage(f"file://{tmp_path}/there", RetryPolicy(max_attempts=1)))
    remote.upload(tmp_path / "here" / "step-00000002", 2)
    save(small_disk, 1)
    with pytest.raises(WanmaError, match="No space left on device"):
        remote.download(2, small_disk)
    require_first_whole(small_disk)
