"""Files that are complete or absent: one writer, the others wait, and nothing is left after an error."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from wanma.data.stores.atomic_file import write_once


def test_what_another_process_has_left_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a.building").write_bytes(b"half of a long content")
    with write_once(tmp_path / "a") as file:
        assert file is not None
        file.write(b"whole")
    assert (tmp_path / "a").read_bytes() == b"whole"
    with write_once(tmp_path / "a") as file:
        assert file is None
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_nothing_is_left_after_an_error(tmp_path: Path) -> None:
    def fail() -> None:
        with write_once(tmp_path / "folder" / "a") as file:
            assert file is not None
            file.write(b"half")
            raise ValueError("no content")

    with pytest.raises(ValueError, match="no content"):
        fail()
    assert not list((tmp_path / "folder").iterdir())


def test_a_process_forked_meanwhile_does_not_keep_the_lock(tmp_path: Path) -> None:
    path, is_seen = tmp_path / "file", threading.Event()

    def wait_for_file() -> None:
        with write_once(path) as file:
            assert file is None
        is_seen.set()

    thread = threading.Thread(target=wait_for_file)
    with write_once(path) as file:
        assert file is not None
        thread.start()
        time.sleep(0.2)  # until it waits
        child = os.fork()
        if child == 0:
            signal.pause()
        file.write(b"whole")
    try:
        assert is_seen.wait(10)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        thread.join()
    assert path.read_bytes() == b"whole"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
