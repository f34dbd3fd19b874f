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

from wanma.elastic.detection.hang_detector import HangDetector
from wanma.elastic.detection.hang_report import format_hang_report, parse_stack_dump
from wanma.elastic.launch_config import LaunchConfig, ScriptSettings
from wanma.elastic.protocol.local_messages import CollectiveStateReport
from wanma.elastic.protocol.messages import (
    RankStatus,
)
from wanma.elastic.workers.flight_recorder import merge_records
from wanma.elastic.workers.progress_board import ProgressBoard
from wanma.job.run.worker import OUTSIDE_SESSION_PHASE

WAITING = RankStatus(
    0, 0, "a", 7, "gradient exchange", 12.0, "", ("/torch/x.py:1 in all_reduce", "/job/loop.py:9 in step"),
    "all_reduce #17 of group default_pg",
)  # fmt: skip
LOADING = RankStatus(
    1, 0, "a", 7, "data loading", 12.4, "", ("/job/file.py:81 in read", "/job/loop.py:3 in next")
)


def test_the_odd_one_out_comes_first_and_the_others_are_one_line() -> None:
    ranks = [dataclasses.replace(WAITING, rank=rank) for rank in (0, 2, 3, 5)]
    summary, report = format_hang_report([*ranks, LOADING], 12, "cluster.hang_timeout_seconds = 10")
    assert summary.splitlines() == [
        "no rank reported progress for 12 s (cluster.hang_timeout_seconds = 10): rank 1 is in data loading "
        "(file.py:81) while 4 other ranks wait in all_reduce #17 of group default_pg",
        "  rank 1 has been in data loading of step 7 for 12 s (/job/file.py:81 in read)   <- outlier",
        "  ranks 0, 2-3, 5 have been in gradient exchange of step 7 for 12 s, "
        "wait in all_reduce #17 of group default_pg (/job/loop.py:9 in step)",
    ]
    assert report.startswith(summary)
    assert report.count("/torch/x.py:1 in all_reduce") == 1


def test_on_several_nodes_each_group_is_told_with_its_own() -> None:
    where = ((0, 0, "a"), (2, 1, "b"), (3, 1, "b"))
    ranks = [
        dataclasses.replace(WAITING, rank=rank, node_rank=node, hostname=host) for rank, node, host in where
    ]
    summary, _ = format_hang_report([*ranks, LOADING], 12, "limit")
    odd, others = summary.splitlines()[1:]
    assert odd.startswith("  rank 1 (node 0, a) has been in data loading")
    assert others.startswith("  ranks 0, 2-3 (nodes 0-1) have been in gradient exchange")


def test_of_two_ranks_the_one_that_is_missing_in_the_collective_is_odd() -> None:
    summary, _ = format_hang_report([WAITING, LOADING], 12, "limit")
    assert summary.splitlines()[1].startswith("  rank 1 has been in data loading")
    assert [line.endswith("<- outlier") for line in summary.splitlines()] == [False, True, False]


def test_those_in_one_collective_are_not_odd_wherever_their_code_stands() -> None:
    elsewhere = dataclasses.replace(
        WAITING, rank=2, stack=("/torch/x.py:1 in all_reduce", "/job/other.py:4 in f")
    )
    summary, _ = format_hang_report(
        [WAITING, dataclasses.replace(WAITING, rank=3), elsewhere, LOADING], 12, "limit"
    )
    first, *others = summary.splitlines()
    assert first.endswith(
        ": rank 1 is in data loading (file.py:81) while 3 other ranks wait in "
        "all_reduce #17 of group default_pg"
    )
    assert [line.endswith("<- outlier") for line in others] == [True, False, False]


def test_a_rank_in_an_earlier_collective_and_one_that_is_stopped_are_told_with_it() -> None:
    ranks = [dataclasses.replace(WAITING, rank=rank) for rank in range(5)]
    behind = dataclasses.replace(WAITING, rank=5, current_collective="all_reduce #16 of group default_pg")
    stopped = dataclasses.replace(LOADING, rank=6, process_state="stopped (SIGSTOP?)", stack=())
    summary, _ = format_hang_report([*ranks, behind, stopped], 12, "limit")
    first = summary.splitlines()[0].partition(": ")[2]
    assert first == (
        "rank 6 is stopped (SIGSTOP?), rank 5 waits in all_reduce #16 of group default_pg "
        "while 5 other ranks wait in all_reduce #17 of group default_pg"
    )


def test_many_kinds_of_odd_ranks_are_counted() -> None:
    odd = [dataclasses.replace(LOADING, rank=10 + n, stack=(f"/job/file.py:{n} in read",)) for n in range(6)]
    summary, _ = format_hang_report(
        [*(dataclasses.replace(WAITING, rank=n) for n in range(4)), *odd], 12, "limit"
    )
    assert ", 3 more groups of ranks are elsewhere while 4 other ranks wait in " in summary.splitlines()[0]


def test_the_last_collectives_of_each_rank_are_in_the_report() -> None:
    loading = dataclasses.replace(
        LOADING, recent_collectives=("all_reduce #15 of group dp", "all_reduce #16 of group dp")
    )
    _, report = format_hang_report([WAITING, loading], 12, "limit")
    assert "collective: none, before that: all_reduce #15 of group dp, all_reduce #16 of group dp\n" in report


def test_the_oldest_collective_under_way_is_the_one_that_is_waited_in() -> None:
    def entry(number: int, retired: bool, group: str = "dp") -> dict[str, Any]:
        return {
            "profiling_name": "gloo:all_reduce",
            "collective_seq_id": number,
            "retired": retired,
            "process_group": ["3", group],
        }

    entries = [*(entry(number, True) for number in range(1, 8)), entry(8, False), entry(9, False)]
    found = merge_records(entries)
    assert found.current_collective == "all_reduce #8 of group dp"
    assert found.recent_collectives == tuple(f"all_reduce #{number} of group dp" for number in (4, 5, 6, 7))
    assert merge_records([entry(1, False, "undefined")]).current_collective == "all_reduce #1 of group 3"
    assert merge_records([]) == CollectiveStateReport("")


def test_when_all_stand_in_the_same_place_nobody_is_odd() -> None:
    summary, _ = format_hang_report([WAITING, dataclasses.replace(WAITING, rank=1)], 12, "limit")
    first, *ranks = summary.splitlines()
    assert first == "no rank reported progress for 12 s (limit)"
    assert len(ranks) == 1
    assert "outlier" not in summary


def test_a_rank_that_cannot_answer_is_described_by_the_kernel() -> None:
    stopped = RankStatus(1, 0, "a", None, "", 0.0, "stopped (SIGSTOP?)", ())
    summary, report = format_hang_report([WAITING, stopped], 12, "limit")
    assert "rank 1 has sent no report for 0 s" in summary
    assert "no stack: the process did not respond" in report


def test_thousands_of_ranks_stay_readable() -> None:
    ranks = [dataclasses.replace(WAITING, rank=rank) for rank in range(4096) if rank != 1]
    summary, _ = format_hang_report([*ranks, LOADING], 12, "limit")
    assert "ranks 0, 2-4095 have been" in summary


def test_a_thread_that_loads_data_for_the_main_thread_stands_for_it() -> None:
    dump = """\
Thread 0x0000000000000007 (most recent call first):
  File "/job/dataset.py", line 81 in __getitem__
  File "/x/wanma/data/step_loader.py", line 90 in load
  File "/python/concurrent/futures/thread.py", line 58 in run

Thread 0x0000000000000005 (most recent call first):
  File "/python/threading.py", line 320 in wait
  File "/x/wanma/data/step_loader.py", line 79 in __next__
  File "/x/wanma/training/loop/training_loop.py", line 49 in run_loop
"""
    loads, waits = "/x/wanma/data/step_loader.py:90 in load", "/x/wanma/data/step_loader.py:79 in __next__"
    assert parse_stack_dump(dump, 5) == (
        *("/job/dataset.py:81 in __getitem__", loads),
        *(
            "/python/threading.py:320 in wait",
            waits,
            "/x/wanma/training/loop/training_loop.py:49 in run_loop",
        ),
    )
    assert parse_stack_dump(dump, 7)[0] == "/job/dataset.py:81 in __getitem__"
    assert (
        parse_stack_dump(dump.replace("in __next__", "in close"), 5)[0] == "/python/threading.py:320 in wait"
    )


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
    mine = parse_stack_dump(dump, threading.get_ident())
    assert mine[0].endswith(" in test_the_stack_of_the_wanted_thread_is_found_in_a_real_dump")
    assert parse_stack_dump(dump, 0) == mine
    assert any(frame.endswith(" in elsewhere") for frame in parse_stack_dump(dump, other.ident or 0))
    assert parse_stack_dump("", 1) == ()


@pytest.fixture
def board() -> Any:
    board = ProgressBoard.create(2)
    yield board
    board.close()


def test_a_report_on_the_board_is_read_back_by_another_opener(board: ProgressBoard) -> None:
    again = ProgressBoard(os.dup(board.descriptor), 2)
    before = time.monotonic()
    board.writer(1).report_progress(41, "Rückwärts")
    position = again.read_progress(1)
    assert (position.report_count, position.step, position.phase) == (1, 41, "Rückwärts")
    assert before <= position.reported_at <= time.monotonic()
    assert position.main_thread == threading.get_ident()
    assert again.read_progress(0).report_count == 0
    board.writer(0).report_progress(-1, "é" * 100)
    assert again.read_progress(0).phase == "é" * 24
    assert not again.is_drain_requested()
    board.request_drain()
    assert again.is_drain_requested()
    again.close()


def test_silence_is_measured_against_the_start_and_then_from_step_to_step(board: ProgressBoard) -> None:
    launch = LaunchConfig(
        Path("run"), "a:b", ranks_per_node=2, start_timeout_seconds=50, hang_timeout_seconds=5
    )
    now = time.monotonic()
    watch = HangDetector(board, launch, now)
    assert watch.check(now + 49) is None
    assert watch.check(now + 51) == (pytest.approx(51), "cluster.start_timeout_seconds = 50")
    writer = board.writer(1)
    writer.report_progress(0, "building")
    writer.report_progress(100, "forward")  # resumed at step 100: not yet a step of this run
    now = time.monotonic()
    assert watch.check(now + 49) is None
    writer.report_progress(101, "forward")
    assert watch.check(time.monotonic() + 4) is None
    silence = watch.check(time.monotonic() + 6)
    assert silence is not None
    assert silence[1] == "cluster.hang_timeout_seconds = 5"


def test_a_long_phase_that_keeps_reporting_is_no_hang(board: ProgressBoard) -> None:
    launch = LaunchConfig(
        Path("run"), "a:b", ranks_per_node=2, start_timeout_seconds=50, hang_timeout_seconds=5
    )
    watch = HangDetector(board, launch, time.monotonic())
    writer = board.writer(0)
    for step in range(3):
        writer.report_progress(step, "forward")
    assert watch.check(time.monotonic() + 4) is None
    writer.report_progress(2, "validation")
    assert watch.check(time.monotonic() + 4.9) is None


def test_a_script_is_judged_while_one_of_its_ranks_has_a_session_open(board: ProgressBoard) -> None:
    launch = LaunchConfig(
        Path("run"),
        "a:b",
        ranks_per_node=2,
        start_timeout_seconds=50,
        hang_timeout_seconds=5,
        script=ScriptSettings(),
    )
    watch = HangDetector(board, launch, time.monotonic())
    assert watch.check(time.monotonic() + 1000) is None
    writer = board.writer(0)
    for step in range(3):
        writer.report_progress(step, "forward")
    watch = HangDetector(board, launch, time.monotonic())
    assert watch.check(time.monotonic() + 4) is None
    assert watch.check(time.monotonic() + 6) is not None
    writer.report_progress(2, OUTSIDE_SESSION_PHASE)
    assert watch.check(time.monotonic() + 1000) is None
