"""What becomes of a console that nobody can write to."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest

from wanma.job.observe_section import ObserveSection
from wanma.job.run_directory import RunDirectory
from wanma.observe.console import open_console
from wanma.observe.lasting import LastingStream


class Disk(io.StringIO):
    """A log on a disk that is full for a while."""

    is_full = False

    def write(self, text: str) -> int:
        if self.is_full:
            raise OSError(28, "No space left on device")
        return super().write(text)


def full_disk() -> TextIO:
    return os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")


def pipe_without_a_reader() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.mark.parametrize("mode", ["plain", "live"])
@pytest.mark.parametrize("broken", [full_disk, pipe_without_a_reader])
def test_nothing_fails_where_the_console_cannot_be_written(
    mode: str, broken: Callable[[], TextIO], tmp_path: Path
) -> None:
    stream = broken()
    observe = ObserveSection(console=mode)  # type: ignore[arg-type]  # one of the four
    with open_console(RunDirectory(tmp_path), observe, 3, stream) as console:
        console.write({"kind": "start", "step": 0, "steps": 3})
        console.write({"kind": "message", "level": "warning", "text": "look " * 4000})
    stream.flush()  # as Python does when it exits
    stream.close()


def test_a_log_goes_on_once_its_disk_has_room_again() -> None:
    disk = Disk()
    stream = LastingStream(disk)
    stream.write("one\n")
    disk.is_full = True
    stream.write("two\n")
    disk.is_full = False
    stream.write("three\n")
    stream.let_go()
    assert disk.getvalue() == "one\nthree\n"
