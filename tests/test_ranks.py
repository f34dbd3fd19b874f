"""Processes of ranks: which one is blamed for a failure, and which serve again."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from support import ranks
from support.ranks import RankCrashError, run_ranks
from support.slowness import patient
from wanma.elastic.workers.linux_processes import process_state
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.parallel import CollectiveTransport
from wanma.parallel.mesh.parallel_mesh import open_mesh


def crash(worker: WorkerContext) -> None:
    """Rank 1 dies, and then rank 0 fails."""
    store = dist.TCPStore("127.0.0.1", worker.store_port, is_master=False)
    if worker.rank == 1:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        store.set("process of rank 1", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSEGV)
    process = int(store.get("process of rank 1"))
    while process_state(process) not in ("gone", "dead"):
        time.sleep(0.01)
    raise ConnectionError("closed by peer")


def refuse(worker: WorkerContext) -> None:
    raise ValueError(f"not on rank {worker.rank}")


def test_a_rank_that_crashed_is_blamed_and_not_those_that_it_took_down() -> None:
    with pytest.raises(RankCrashError, match="rank 1 died of SIGSEGV"):
        run_ranks(crash, 2, (), seconds=20)


def test_a_rank_that_fails_has_not_crashed() -> None:
    with pytest.raises(AssertionError, match="not on rank") as caught:
        run_ranks(refuse, 2, (), seconds=20)
    assert not isinstance(caught.value, RankCrashError)


def leave_a_mark(worker: WorkerContext, name: str) -> tuple[int, str | None]:
    before = os.environ.get("MARK_OF_A_RANK")
    os.environ["MARK_OF_A_RANK"] = name
    torch.use_deterministic_algorithms(True)
    return os.getpid(), before


def test_processes_serve_again_without_what_the_last_run_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "MAX_RUNS", 1000)
    first = run_ranks(leave_a_mark, 2, ("first",), is_reused=True)
    again = run_ranks(leave_a_mark, 2, ("again",), is_reused=True)
    assert again == first, "the same processes in the same order, and no mark in them"
    assert [mark for _, mark in first] == [None, None]


def test_a_process_ends_after_its_last_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "MAX_RUNS", 1)
    first, again = (run_ranks(leave_a_mark, 1, ("mark",), is_reused=True) for _ in range(2))
    assert first[0][0] != again[0][0]


def test_processes_of_a_run_that_failed_serve_no_other() -> None:
    before = run_ranks(leave_a_mark, 2, ("before",), is_reused=True)
    with pytest.raises(AssertionError, match="not on rank"):
        run_ranks(refuse, 2, (), seconds=20, is_reused=True)
    after = run_ranks(leave_a_mark, 2, ("after",), is_reused=True)
    assert {pid for pid, _ in before}.isdisjoint(pid for pid, _ in after)


def place_in_mesh(worker: WorkerContext) -> int:
    """Place along a mesh of what an operator of DTensor gives."""
    store = dist.TCPStore("127.0.0.1", worker.store_port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=worker.rank, world_size=worker.world_size)
    try:
        mesh = init_device_mesh("cpu", (worker.world_size,))
        doubled = distribute_tensor(torch.arange(worker.world_size), mesh, [Shard(0)]) * 2
        assert isinstance(doubled, DTensor)
        return doubled.device_mesh.get_local_rank()
    finally:
        dist.destroy_process_group()


def test_a_process_that_serves_again_knows_its_place() -> None:
    for _ in range(2):
        assert run_ranks(place_in_mesh, 3, (), is_reused=True) == [0, 1, 2]
        with pytest.raises(AssertionError, match="not on rank 0"):
            run_ranks(refuse, 1, (), seconds=20, is_reused=True)


def threads_and_place_in_mesh(worker: WorkerContext) -> int:
    threads = len(list(Path("/proc/self/task").iterdir()))
    place_in_mesh(worker)
    return threads


def test_a_process_that_serves_again_keeps_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "MAX_RUNS", 1000)
    threads = [run_ranks(threads_and_place_in_mesh, 2, (), is_reused=True) for _ in range(4)]
    assert threads[1] == threads[2] == threads[3], "groups that are kept keep their threads"


def wait_in_another_thread(release: threading.Event) -> None:
    release.wait()


def leave_the_others_alone(release: threading.Event) -> None:
    threading.Thread(target=wait_in_another_thread, args=(release,), daemon=True).start()
    release.wait()


def hang(worker: WorkerContext, collectives: CollectiveTransport, folder: Path) -> None:
    """Rank 0 stops, rank 2 is elsewhere, and rank 1 waits for them in its second collective."""
    with open_mesh(worker, Plan(dp_replicate=3), 60, collectives):
        dist.all_reduce(torch.zeros(1))
        (folder / f"rank {worker.rank}").touch()
        if worker.rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        if worker.rank == 2:
            leave_the_others_alone(threading.Event())
        dist.all_reduce(torch.zeros(1))


@pytest.mark.parametrize("collectives", ["shared_memory", "gloo"])
@pytest.mark.daily("shared_memory")
def test_a_hang_is_reported_with_the_state_of_every_rank(
    collectives: CollectiveTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait_for_the_hang(connections: list[Connection], timeout: float) -> list[Any]:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        return wait(connections, timeout)

    run_ranks(leave_a_mark, 2, ("mark",), is_reused=True)
    runs = [ranks._idle_processes[rank][-1].runs for rank in range(2)]
    monkeypatch.setattr(ranks, "wait", wait_for_the_hang)
    with pytest.raises(TimeoutError) as caught:
        run_ranks(hang, 3, (collectives, tmp_path), seconds=1, is_reused=True)
    summary, stopped, waiting, elsewhere = str(caught.value).split("\n\nrank ")
    assert summary == "no answer of ranks [0, 1, 2] in 1 s, and none of them moved any more"
    assert stopped.startswith(f"0: run {runs[0] + 1} of process ")
    assert "stopped (SIGSTOP?)" in stopped
    assert waiting.startswith(f"1: run {runs[1] + 1} of process ")
    assert "collective: all_reduce #2 of group default_pg; ended before it: " in waiting
    assert "in hang" in waiting
    assert "collective: none; ended before it: " in elsewhere
    assert "in leave_the_others_alone" in elsewhere
    assert "in wait_in_another_thread" in elsewhere
    assert cpu_seconds(elsewhere, " since the time-out") < 0.2


def work(worker: WorkerContext, seconds: float) -> None:
    """Rank 1 works, in a place that is another each time one looks; it soon leaves the cores to others."""
    began = time.monotonic()
    while worker.rank == 1 and time.monotonic() < began + seconds:
        dist.HashStore().set("key", "value")
        if time.monotonic() > began + 0.5:
            time.sleep(0.01)


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> int:
    """Limit for ranks in processes that are there already, and that each look finds elsewhere."""
    run_ranks(leave_a_mark, 2, ("mark",), is_reused=True)
    positions = itertools.count()
    monkeypatch.setattr(ranks._RankProcess, "read_position", lambda _: str(next(positions)))
    return patient(1)


def test_ranks_that_move_get_more_time(seconds: int) -> None:
    assert run_ranks(work, 2, (2.5 * seconds,), seconds=seconds, is_reused=True) == [None, None]


def test_a_rank_that_answered_is_told_from_one_that_is_at_work(seconds: int) -> None:
    runs = [ranks._idle_processes[rank][-1].runs for rank in range(2)]
    with pytest.raises(TimeoutError) as caught:
        run_ranks(work, 2, (600.0,), seconds=seconds, is_reused=True)
    summary, answered, at_work = str(caught.value).split("\n\nrank ")
    assert summary == f"no answer of ranks [1] in {5 * seconds} s, though they still moved"
    assert answered.startswith(f"0, has answered: run {runs[0] + 1} of process ")
    assert at_work.startswith(f"1: run {runs[1] + 1} of process ")
    assert "in work" in at_work
    assert cpu_seconds(at_work, " CPU seconds in this run") > 0


def cpu_seconds(state: str, label: str) -> float:
    return float(state.partition(label)[0].rpartition(" ")[2])
