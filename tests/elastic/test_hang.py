from __future__ import annotations

import dataclasses
import faulthandler
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from wanma.elastic.board import Board
from wanma.elastic.hang import hang_report, main_thread_stack
from wanma.elastic.launch import Launch
from wanma.elastic.messages import Standing
from wanma.elastic.watch import Watch

WAITING = Standing(
    0, 0, "a", 7, "gradient exchange", 12.0, "", ("/torch/x.py:1 in all_reduce", "/job/loop.py:9 in step"),
    "all_reduce 17 of group default_pg",
)  # fmt: skip
LOADING = Standing(
    1, 0, "a", 7, "data loading", 12.4, "", ("/job/file.py:81 in read", "/job/loop.py:3 in next")
)


def test_the_odd_one_out_comes_first_and_the_others_are_one_line() -> None:
    ranks = [dataclasses.replace(WAITING, rank=rank) for rank in (0, 2, 3, 5)]
    summary, report = hang_report([*ranks, LOADING], 12, "cluster.hang_seconds = 10")
    assert summary.splitlines() == [
        "no rank has moved for 12 s (cluster.hang_seconds = 10)",
        "  rank 1 is in data loading of step 7 since 12 s (/job/file.py:81 in read)   <- the odd one out",
        "  ranks 0, 2-3, 5 are in gradient exchange of step 7 since 12 s, "
        "wait in all_reduce 17 of group default_pg (/job/loop.py:9 in step)",
    ]
    assert report.startswith(summary)
    assert report.count("/torch/x.py:1 in all_reduce") == 1


def test_on_several_nodes_each_group_is_told_with_its_own() -> None:
    where = ((0, 0, "a"), (2, 1, "b"), (3, 1, "b"))
    ranks = [dataclasses.replace(WAITING, rank=rank, node=node, host=host) for rank, node, host in where]
    summary, _ = hang_report([*ranks, LOADING], 12, "limit")
    odd, others = summary.splitlines()[1:]
    assert odd.startswith("  rank 1 (node 0, a) is in data loading")
    assert others.startswith("  ranks 0, 2-3 (nodes 0-1) are in gradient exchange")


def test_of_two_ranks_the_one_that_is_missing_in_the_collective_is_odd() -> None:
    summary, _ = hang_report([WAITING, LOADING], 12, "limit")
    assert summary.splitlines()[1].startswith("  rank 1 is in data loading")
    assert [line.endswith("<- the odd one out") for line in summary.splitlines()] == [False, True, False]


def test_when_all_stand_in_the_same_place_nobody_is_odd() -> None:
    summary, _ = hang_report([WAITING, dataclasses.replace(WAITING, rank=1)], 12, "limit")
    assert "odd" not in summary


def test_a_rank_that_cannot_answer_is_described_by_the_kernel() -> None:
    stopped = Standing(1, 0, "a", None, "", 0.0, "stopped (SIGSTOP?)", ())
    summary, report = hang_report([WAITING, stopped], 12, "limit")
    assert "rank 1 is before the first report since 0 s, the process is stopped (SIGSTOP?)" in summary
    assert "no stack: the process did not answer" in report


def test_thousands_of_ranks_stay_readable() -> None:
    ranks = [dataclasses.replace(WAITING, rank=rank) for rank in range(4096) if rank != 1]
    summary, _ = hang_report([*ranks, LOADING], 12, "limit")
    assert "ranks 0, 2-4095 are" in summary


def test_the_stack_of_the_wanted_thread_is_found_in_a_real_dump() -> None:
    def elsewhere() -> None:
        done.wait()

    done = threading.Event()
    other = threading.Thread(target=elsewhere)
    other.start()
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        dump = file.read()
    done.set()
    other.join()
    mine = main_thread_stack(dump, threading.get_ident())
    assert mine[0].endswith(" in test_the_stack_of_the_wanted_thread_is_found_in_a_real_dump")
    assert main_thread_stack(dump, 0) == mine
    assert any(frame.endswith(" in elsewhere") for frame in main_thread_stack(dump, other.ident or 0))
    assert main_thread_stack("", 1) == ()


@pytest.fixture
def board() -> Any:
    board = Board.create(2)
    yield board
    board.close()


def test_a_report_on_the_board_is_read_back_by_another_opener(board: Board) -> None:
    again = Board(os.dup(board.descriptor), 2)
    before = time.monotonic()
    board.writer(1).write(41, "Rückwärts")
    position = again.read(1)
    assert (position.calls, position.step, position.phase) == (1, 41, "Rückwärts")
    assert before <= position.seconds <= time.monotonic()
    assert position.main_thread == threading.get_ident()
    assert again.read(0).calls == 0
    board.writer(0).write(-1, "é" * 100)
    assert again.read(0).phase == "é" * 24
    assert not again.stop_requested()
    board.request_stop()
    assert again.stop_requested()
    again.close()


def test_silence_is_measured_against_the_start_and_then_from_step_to_step(board: Board) -> None:
    launch = Launch(Path("run"), "a:b", ranks_per_node=2, start_seconds=50, hang_seconds=5)
    now = time.monotonic()
    watch = Watch(board, launch, now)
    assert watch.look(now + 49) is None
    assert watch.look(now + 51) == (51, "cluster.start_seconds = 50")
    writer = board.writer(1)
    writer.write(0, "building")
    writer.write(100, "forward")  # resumed at step 100: not yet a step of this run
    now = time.monotonic()
    assert watch.look(now + 49) is None
    writer.write(101, "forward")
    assert watch.look(time.monotonic() + 4) is None
    silence = watch.look(time.monotonic() + 6)
    assert silence is not None
    assert silence[1] == "cluster.hang_seconds = 5"


def test_a_long_phase_that_keeps_reporting_is_no_hang(board: Board) -> None:
    launch = Launch(Path("run"), "a:b", ranks_per_node=2, start_seconds=50, hang_seconds=5)
    watch = Watch(board, launch, time.monotonic())
    writer = board.writer(0)
    for step in range(3):
        writer.write(step, "forward")
    assert watch.look(time.monotonic() + 4) is None
    writer.write(2, "validation")
    assert watch.look(time.monotonic() + 4.9) is None
