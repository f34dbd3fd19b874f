"""Console to which nothing can be written."""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest

from wanma.job.run.run_directory import RunDirectory
from wanma.job.sections.observe import ObserveSection
from wanma.observe.console import fault_tolerant_stream
from wanma.observe.console.fault_tolerant_stream import FaultTolerantStream
from wanma.observe.console.opening import open_console


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
    stream = FaultTolerantStream(disk)
    stream.write("one\n")
    disk.is_full = True
    stream.write("two\n")
    disk.is_full = False
    stream.write("three\n")
    stream.discard_pending()
    assert disk.getvalue() == "one\nthree\n"


def test_a_terminal_that_is_not_read_keeps_nobody_waiting_and_is_told_what_it_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-S, or a pipe into a program that does something else."""
    monkeypatch.setattr(fault_tolerant_stream, "MAX_PENDING_BYTES", 1 << 18)
    reader, writer = os.pipe()
    stream = FaultTolerantStream(os.fdopen(writer, "w", closefd=False))
    began = time.monotonic()
    for number in range(10_000):
        stream.write(f"line {number} of many that nobody reads for now{'.' * 50}\n")
        stream.flush()
    assert time.monotonic() - began < 3, "it waits for nobody"

    said: list[bytes] = []

    def read() -> None:
        while data := os.read(reader, 1 << 16):
            said.append(data)

    thread = threading.Thread(target=read)
    thread.start()
    stream.discard_pending()
    os.close(writer)
    thread.join(5)
    text = b"".join(said).decode()
    shown = [line for line in text.splitlines() if line.startswith("line ")]
    assert [int(line.split()[1]) for line in shown] == list(range(len(shown))), "in order, none torn"
    dropped = 10_000 - len(shown)
    assert 0 < dropped < 9_000
    assert f"{dropped:,} lines dropped" in text
    os.close(reader)


def test_a_reader_that_keeps_up_sees_every_line() -> None:
    reader, writer = os.pipe()
    said: list[bytes] = []

    def read() -> None:
        while data := os.read(reader, 1 << 16):
            said.append(data)

    thread = threading.Thread(target=read)
    thread.start()
    stream = FaultTolerantStream(os.fdopen(writer, "w", closefd=False))
    for number in range(20_000):
        stream.write(f"line {number} of a script that prints a lot, as fast as it can\n")
    stream.discard_pending()
    os.close(writer)
    thread.join(5)
    os.close(reader)
    assert b"".join(said).count(b"\n") == 20_000


def test_the_end_of_a_run_does_not_wait_for_ever_for_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_tolerant_stream, "CLOSE_TIMEOUT_SECONDS", 0.1)
    reader, writer = os.pipe()
    stream = FaultTolerantStream(os.fdopen(writer, "w", closefd=False))
    stream.write("x" * (1 << 20))
    stream.discard_pending()
    os.close(reader)
