"""Real ranks under a real supervisor: how they start, end, fail, hang and stop.

Ranks that have others import torch to meet them, so every day one rank shows what takes no more.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from support.slowness import patient
from support.waiting import wait_until
from wanma.elastic import failure
from wanma.elastic.supervisor import worker_group
from wanma.elastic.supervisor.stop_signals import SIGNAL_REPEAT_SECONDS
from wanma.elastic.supervisor.supervisor import run_supervisor
from wanma.elastic.workers import fork_server_handle
from wanma.elastic.workers.fork_server_handle import ForkServerHandle
from wanma.elastic.workers.linux_processes import process_state, set_process_name

NO_MEMORY_KILL = failure.format_sigkill_hint(0, 0, 0)
"""Text about a process that the test itself killed."""


@pytest.fixture(autouse=True)
def _no_memory_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel counts for the whole machine, also what it kills in a test beside this one."""
    for module in (failure, worker_group, fork_server_handle):
        monkeypatch.setattr(module, "count_oom_kills", lambda: 0)


def is_gone(pid: int) -> bool:
    return process_state(pid) in ("gone", "dead")


def test_a_process_is_called_by_the_first_name_that_the_kernel_can_hold() -> None:
    own = Path("/proc/self/comm")
    before = own.read_text().strip()
    try:
        set_process_name("wanma rank 9999", "rank 9999")
        assert own.read_text() == "wanma rank 9999\n"
        set_process_name("wanma rank 10000", "rank 10000")
        assert own.read_text() == "rank 10000\n"
    finally:
        set_process_name(before)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_run_that_ends_well_passes_on_the_events_of_rank_0(run: Any, ranks: int) -> None:
    ran = run("finish", payload=b"hello", ranks_per_node=ranks)
    assert ran.outcome.exit_code == 0
    assert ran.outcome.failure_text == ""
    assert [event["loss"] for event in ran.events if event["kind"] == "step"] == [1.5, 0.5, -0.5]
    for rank in range(ranks):
        header, payload = ran.log(rank).splitlines()
        assert f"rank {rank} of {ranks} on node 0" in header
        assert header.endswith("forked ---")
        assert payload == "payload 'hello'"


def test_a_worker_is_settled_in_before_its_entry_runs(run: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("WANMA_SECRET", "a secret of twenty characters")
    ran = run(
        "describe",
        payload=str(tmp_path).encode(),
        ranks_per_node=2,
        preload_modules=("torch",),
        threads_per_rank=2,
        worker_environment={"MALLOC_TRIM_THRESHOLD_": "17179869184"},
    )
    assert ran.outcome.failure_text == ""
    about = [json.loads((tmp_path / f"about-{rank}.json").read_text()) for rank in (0, 1)]
    assert [(a["rank"], a["local_rank"], a["world_size"], a["node_rank"]) for a in about] == [
        (0, 0, 2, 0),
        (1, 1, 2, 0),
    ]
    assert [a["store"] for a in about] == ["TCPStore", "NoneType"]
    assert [a["name"] for a in about] == ["wanma rank 0", "wanma rank 1"]
    for one in about:
        assert one["generation"] == 1
        assert one["threads"] == 2
        assert one["session"] == one["pid"]
        assert one["ignores_interrupt"]
        assert one["environment"]["OMP_NUM_THREADS"] == "2"
        assert one["environment"]["MALLOC_TRIM_THRESHOLD_"] == "17179869184"
        assert one["environment"]["GLOO_SOCKET_IFNAME"] == "lo"
        assert "secret" not in json.dumps([one["environment"], one["arguments"]]).lower()
    assert len(about[1]["sockets"]) == 1, "only its channel: nothing of the fork server or of other ranks"


def test_the_end_of_a_worker_is_that_of_an_interpreter(run: Any) -> None:
    ran = run("last_words")
    assert ran.outcome.exit_code == 0
    for words in ("from atexit", "from an executor", "from a thread", "without a newline"):
        assert words in ran.log(0)


def test_an_exception_on_one_rank_ends_all_with_one_message(run: Any) -> None:
    ran = run("raise_on_rank_1", ranks_per_node=3, preload_modules=("torch",))
    assert ran.outcome.exit_code == 1
    assert ran.outcome.failure.rank == 1
    lines = ran.outcome.failure_text.splitlines()
    assert lines[0].startswith("rank 1 (node 0, ")
    assert lines[0].endswith(" failed: ValueError: no such column: prize")
    assert "elastic_entries.py" in ran.outcome.failure_text
    assert lines[-1] == f"  log: {ran.launch.run_directory}/logs/rank-1.log"
    assert ran.outcome.failure_text.count("Traceback") == 1
    assert "no such column: prize" in ran.log(1)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_an_error_that_says_what_to_do_comes_without_traceback_and_with_its_exit_code(
    run: Any, ranks: int
) -> None:
    ran = run("refuse_everywhere", ranks_per_node=ranks)
    assert ran.outcome.exit_code == 2
    assert "the corpus is empty" in ran.outcome.failure_text
    assert ran.outcome.failure_text.splitlines()[-1] == "  give data.text some files"
    assert "Traceback" not in ran.outcome.failure_text


def test_the_cause_is_told_and_not_its_echo(run: Any) -> None:
    ran = run("echo_before_cause", ranks_per_node=2, preload_modules=("torch",))
    assert ran.outcome.failure.cause == "ValueError: the cause"


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_killed_rank_is_named_with_its_signal_and_a_hint(run: Any, ranks: int) -> None:
    ran = run("kill_last_rank", ranks_per_node=ranks)
    assert ran.outcome.exit_code == 1
    assert f"rank {ranks - 1} (" in ran.outcome.failure_text
    assert "killed by SIGKILL" in ran.outcome.failure_text
    assert ran.outcome.failure_text.endswith(NO_MEMORY_KILL)


def test_leaving_without_finishing_is_a_failure(run: Any) -> None:
    ran = run("leave_early")
    assert ran.outcome.failure.cause == "its process exited with code 0 before its work was finished"
    ran = run("exit_with_3")
    assert ran.outcome.failure.cause == "SystemExit: 3"


def test_an_entry_that_does_not_exist_is_one_message(run: Any) -> None:
    ran = run("finnish")
    assert ran.outcome.exit_code != 0
    assert "Did you mean 'finish'?" in ran.outcome.failure_text


def test_a_hang_is_reported_with_the_odd_rank_out(run: Any) -> None:
    ran = run(
        "rank_1_hangs_in_data_loading",
        ranks_per_node=3,
        preload_modules=("torch",),
        hang_timeout_seconds=patient(5),
        start_timeout_seconds=60,
    )
    assert ran.outcome.exit_code == 1
    summary = ran.outcome.failure_text.splitlines()
    assert (
        f"(cluster.hang_timeout_seconds = {patient(5)}): rank 1 is in data loading (elastic_entries.py:"
        in summary[0]
    )
    assert summary[0].endswith(" while 2 other ranks wait in all_reduce #3 of group default_pg")
    assert summary[1].startswith("  rank 1 has been in data loading of step 2 for ")
    assert "elastic_entries.py" in summary[1]
    assert "in wait_forever" in summary[1]
    assert summary[1].endswith("<- outlier")
    assert summary[2].startswith("  ranks 0, 2 have been in gradient exchange of step 2 for ")
    assert "all_reduce #3 of group default_pg" in summary[2]
    assert "in rank_1_hangs_in_data_loading" in summary[2]
    report = (ran.launch.run_directory / "logs" / "hang-report.txt").read_text()
    assert report.startswith(summary[0])
    assert "in all_reduce" in report
    (hang,) = [event for event in ran.events if event["kind"] == "hang"]
    assert report.startswith(hang["text"])
    assert next(line.strip() for line in hang["text"].splitlines()) == summary[0]


@pytest.mark.slow
def test_a_rank_that_never_takes_its_first_step_is_found_too_even_when_it_cannot_answer(run: Any) -> None:
    ran = run("rank_1_is_stopped", ranks_per_node=2, preload_modules=("torch",), start_timeout_seconds=6)
    odd = next(line for line in ran.outcome.failure_text.splitlines() if line.startswith("  rank 1"))
    assert "the process is stopped (SIGSTOP?)" in odd
    assert "cluster.start_timeout_seconds = 6" in ran.outcome.failure_text


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_one_interrupt_stops_in_order(run: Any, ranks: int) -> None:
    def interrupt(event: dict[str, Any]) -> None:
        if event["kind"] == "start":
            os.kill(os.getpid(), signal.SIGINT)

    ran = run("until_stopped", interrupt, ranks_per_node=ranks)
    assert ran.outcome.exit_code == 130
    assert ran.outcome.failure is None
    assert ran.messages == ["stopping after this step: Ctrl-C (press again to abort at once)"]
    assert all("stopped in order" in ran.log(rank) for rank in range(ranks))


def test_an_interrupt_sent_to_the_process_and_to_its_group_is_one(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIGNAL_REPEAT_SECONDS, signal.SIGINT, 60)

    def interrupt(event: dict[str, Any]) -> None:
        if event["kind"] in ("start", "message"):
            os.kill(os.getpid(), signal.SIGINT)

    ran = run("until_stopped", interrupt)
    assert ran.outcome.exit_code == 130
    assert "stopped in order" in ran.log(0)


def test_a_second_interrupt_leaves_at_once_whatever_the_ranks_do(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIGNAL_REPEAT_SECONDS, signal.SIGINT, 0)

    def interrupt(event: dict[str, Any]) -> None:
        if event["kind"] in ("start", "message"):
            os.kill(os.getpid(), signal.SIGINT)

    ran = run("stubborn", interrupt, payload=str(tmp_path).encode())
    assert ran.outcome.exit_code == 130
    for pid in (tmp_path / "pids-0").read_text().split():
        wait_until(
            lambda pid=int(pid): is_gone(pid), "the end of the rank, which ignored SIGTERM, or its child"
        )


def test_sigterm_stops_in_order_and_tells_so_in_the_exit_code(run: Any) -> None:
    def terminate(event: dict[str, Any]) -> None:
        if event["kind"] == "start":
            os.kill(os.getpid(), signal.SIGTERM)

    ran = run("until_stopped", terminate)
    assert ran.outcome.exit_code == 143
    assert "stopped in order" in ran.log(0)


def test_the_signal_handlers_of_the_caller_come_back(run: Any) -> None:
    before = (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    run("finish")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_fork_server_that_dies_is_a_failure_and_not_a_wait(launch: Any) -> None:
    node = ForkServerHandle.start(())
    os.kill(node._process.pid, signal.SIGKILL)
    outcome = run_supervisor(launch, lambda _event: None, node)
    assert outcome.exit_code == 1
    head, hint = outcome.failure_text.splitlines()
    assert head == f"the fork server of node 0 ({socket.gethostname()}) was killed by SIGKILL"
    assert hint == f"  {NO_MEMORY_KILL}"


def test_a_node_that_is_not_needed_is_closed_at_once_and_only_once() -> None:
    with ForkServerHandle.start(("torch",)) as node:
        pass
    node.close()
    assert node._process.returncode == -signal.SIGKILL, "it does not wait for the import"


def test_a_failure_of_the_console_ends_the_ranks(run: Any) -> None:
    class BrokenConsoleError(Exception):
        pass

    def broken(event: dict[str, Any]) -> None:
        raise BrokenConsoleError

    with pytest.raises(BrokenConsoleError):  # and the fixture sees that no process is left
        run("stubborn", broken)
