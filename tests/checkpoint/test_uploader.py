"""Uploading in the background: what goes up, what is told, and what a failure leaves alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.failing_storage import FailingFileSystem, register
from wanma.checkpoint.load.reader import find_defects
from wanma.checkpoint.remote.uploader import Uploader, read_upload_record
from wanma.checkpoint.save.checkpointer import Checkpointer
from wanma.checkpoint.store.checkpoint_folder import RetentionPolicy
from wanma.job.retry import RetryPolicy

QUICK = RetryPolicy(max_attempts=2, initial_backoff_seconds=0.001)


@pytest.fixture
def failing() -> Iterator[type[FailingFileSystem]]:
    yield register()
    FailingFileSystem.reset()


def save(checkpointer: Checkpointer, step: int, metric: float | None = None, value: float = 0.0) -> None:
    checkpointer.save(step, {"model.a": torch.full((100,), step + value)}, {"step": step}, metric=metric)
    (result,) = checkpointer.wait()
    assert result.error is None


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


def test_each_committed_checkpoint_goes_up_and_what_is_where_is_noted(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    checkpointer, uploader = Checkpointer(here), Uploader(here, f"file://{there}")
    for step in (1, 2):
        save(checkpointer, step)
        uploader.request(step)
        assert uploader.wait(30)
    found = uploader.poll()
    assert [(upload.step, upload.error) for upload in found] == [(1, None), (2, None)]
    size = sum(file.stat().st_size for file in (here / "step-00000002").iterdir())
    assert found[1].bytes == size
    assert found[1].url == f"file://{there}"
    assert find_defects(there / "step-00000002") == []
    assert {name: entry["url"] for name, entry in read_upload_record(here).items()} == {
        "step-00000001": f"file://{there}",
        "step-00000002": f"file://{there}",
    }
    assert uploader.poll() == []


def test_the_newest_goes_first_then_what_else_is_on_disk(tmp_path: Path) -> None:
    here = tmp_path / "here"
    checkpointer = Checkpointer(here, keep=5)
    for step in (1, 2, 3, 9):
        save(checkpointer, step)
    uploader = Uploader(here, f"file://{tmp_path}/there")
    uploader.request(3)  # 9 is left from before the run went back
    assert uploader.wait(30)
    assert [upload.step for upload in uploader.poll()] == [3, 2, 1]
    assert names(tmp_path / "there") == ["step-00000001", "step-00000002", "step-00000003"]


def test_a_failure_is_told_once_and_the_next_checkpoint_tries_again(
    tmp_path: Path, failing: type[FailingFileSystem]
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    checkpointer, uploader = Checkpointer(here), Uploader(here, f"failing://{there}", retry_policy=QUICK)
    failing.fails = lambda _: TimeoutError("no route")
    save(checkpointer, 1)
    uploader.request(1)
    assert uploader.wait(30)
    (upload,) = uploader.poll()
    assert upload.step == 1
    assert "TimeoutError: no route (after 2 tries" in str(upload.error)
    assert find_defects(here / "step-00000001") == []
    failing.reset()
    save(checkpointer, 2)
    uploader.request(2)
    assert uploader.wait(30)
    assert [(upload.step, upload.error) for upload in uploader.poll()] == [(2, None), (1, None)]
    assert names(there) == ["step-00000001", "step-00000002"]


def test_a_step_that_was_saved_again_goes_up_again(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    checkpointer, uploader = Checkpointer(here), Uploader(here, f"file://{there}")
    for value in (0.0, 0.5):
        save(checkpointer, 1, value=value)
        uploader.request(1)
        assert uploader.wait(30)
    assert (there / "step-00000001" / "manifest.json").read_bytes() == (
        here / "step-00000001" / "manifest.json"
    ).read_bytes()
    assert find_defects(there / "step-00000001") == []


def test_a_later_process_finds_what_is_there_already(tmp_path: Path) -> None:
    here = tmp_path / "here"
    save(Checkpointer(here), 1)
    for expected in (True, False):
        uploader = Uploader(here, f"file://{tmp_path}/there")
        uploader.request(1)
        assert uploader.wait(30)
        (upload,) = uploader.poll()
        assert (upload.bytes > 0) is expected


def test_what_is_being_uploaded_is_not_removed_meanwhile(
    tmp_path: Path, failing: type[FailingFileSystem]
) -> None:
    here, gate, begun = tmp_path / "here", threading.Event(), threading.Event()

    def slow(_: object) -> None:
        begun.set()
        gate.wait(30)

    failing.fails = slow
    uploader = Uploader(here, f"failing://{tmp_path}/there")
    checkpointer = Checkpointer(here, keep=1, locked_paths=uploader.locked_paths)
    save(checkpointer, 1)
    uploader.request(1)
    assert begun.wait(30)
    save(checkpointer, 2)
    assert names(here) == ["step-00000001", "step-00000002"]
    gate.set()
    uploader.request(2)
    assert uploader.wait(30)
    assert [(upload.step, upload.error) for upload in uploader.poll()] == [(1, None), (2, None)]
    save(checkpointer, 3)
    assert names(here) == ["step-00000003"]


def test_uploaded_ones_stay_by_a_rule_of_their_own(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    checkpointer = Checkpointer(here, keep=1)
    uploader = Uploader(
        here, f"file://{there}", policy=RetentionPolicy(1, keep_best=True, keep_every_steps=20)
    )
    for step, metric in ((10, 1.0), (20, 3.0), (30, 2.0), (40, 5.0), (50, 4.0)):
        save(checkpointer, step, metric)
        uploader.request(step)
        assert uploader.wait(30)
    assert [upload.error for upload in uploader.poll()] == [None] * 5
    assert names(there) == ["step-00000010", "step-00000020", "step-00000040", "step-00000050"]
    assert sorted(read_upload_record(here)) == names(there)


def test_what_would_not_stay_there_is_not_sent(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    checkpointer = Checkpointer(here, keep=9)
    for step, metric in ((10, 2.0), (20, 1.0), (30, 3.0), (40, 4.0)):
        save(checkpointer, step, metric)
    uploader = Uploader(here, f"file://{there}", policy=RetentionPolicy(1, keep_best=True))
    uploader.request(40)
    assert uploader.wait(30)
    assert [upload.step for upload in uploader.poll()] == [40, 20]
    assert names(there) == ["step-00000020", "step-00000040"]


def test_closing_does_not_wait_longer_than_told(tmp_path: Path, failing: type[FailingFileSystem]) -> None:
    here, gate = tmp_path / "here", threading.Event()
    failing.fails = lambda _: gate.wait(1000) and None
    save(Checkpointer(here), 1)
    uploader = Uploader(here, f"failing://{tmp_path}/there")
    uploader.request(1)
    assert not uploader.close(0.1)
    gate.set()
    assert uploader.wait(30)
    (upload,) = uploader.poll()
    assert "the run is stopping" in str(upload.error)
    assert not (tmp_path / "there" / "step-00000001" / "manifest.json").exists()


def test_a_url_that_cannot_be_opened_is_told_and_harms_nothing(tmp_path: Path) -> None:
    here = tmp_path / "here"
    save(Checkpointer(here), 1)
    uploader = Uploader(here, "no-such-protocol://bucket")
    uploader.request(1)
    assert uploader.wait(30)
    (upload,) = uploader.poll()
    assert "'no-such-protocol' is not supported" in str(upload.error)
