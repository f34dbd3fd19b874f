"""Output of ranks, on its way from their logs to the terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from wanma.elastic.transport.event_loop import EventLoop
from wanma.elastic.workers import worker_output
from wanma.elastic.workers.worker_output import OutputReader, exception_line

BORN = "--- 2026-11-24 12:00:00 rank 0 of 1 on node 0 (here), generation 1, process 7, forked ---\n"


@pytest.fixture
def said() -> list[str]:
    return []


def shown(log: Path, said: list[str], *texts: str) -> list[str]:
    """The lines that are handed on when `texts` are written one after the other."""
    log.write_text("of an earlier start\n")
    loop = EventLoop()
    made = OutputReader([(0, log)], loop, lambda event: said.append(event["text"]))
    for text in texts:
        with log.open("a") as file:
            file.write(text)
        made.flush()
    made.close()
    loop.close()
    return said


def test_whole_lines_go_on_however_they_were_written(tmp_path: Path, said: list[str]) -> None:
    assert shown(tmp_path / "log", said, BORN, "one\ntw", "o\n", "\nlast") == ["one", "two", "", "last"]


def test_a_progress_bar_is_its_newest_state(tmp_path: Path, said: list[str]) -> None:
    bar = shown(tmp_path / "log", said, BORN, "\r 0%", "\r 50%", "\r100%\n", "\r 0%\r 10%")
    assert bar == ["100%", " 10%"]


def test_a_line_without_an_end_is_shown_after_a_while(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_output, "PARTIAL_LINE_SECONDS", -1.0)
    log = tmp_path / "log"
    log.write_text("")
    loop = EventLoop()
    made = OutputReader([(0, log)], loop, lambda event: said.append(event["text"]))
    log.write_text("\r 50%")
    loop.run_until(lambda: bool(said))
    made.close()
    loop.close()
    assert said == [" 50%"]


def test_the_traceback_of_the_end_and_our_own_lines_stay_in_the_log(tmp_path: Path, said: list[str]) -> None:
    own = "step 3/4  loss 0.100000  gradient norm 0.2  0.1 s  peak memory 12 bytes\n"
    end = f"half a line{exception_line(0)}\nTraceback ...\nValueError\n"
    assert shown(tmp_path / "log", said, BORN, own, "mine\n", end) == ["mine", "half a line"]


def test_very_long_lines_and_bytes_that_are_no_text_pass(tmp_path: Path, said: list[str]) -> None:
    log = tmp_path / "log"
    long = "x" * (3 * worker_output.CHUNK_BYTES)
    assert "".join(shown(log, said, long + "\n")) == long
    log.write_bytes(b"")
    loop = EventLoop()
    made = OutputReader([(0, log)], loop, lambda event: said.append(event["text"]))
    log.write_bytes(b"\xff\xfe!\n")
    made.close()
    loop.close()
    assert said[-1].endswith("!")
