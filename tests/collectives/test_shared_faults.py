"""A peer that is killed, stopped, gone or elsewhere ends a collective over shared memory with an error that
names it; nothing is left behind."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.compilers import there_is_none
from support.ranks import _context, run_ranks
from support.shared import shared_world
from wanma.collectives.shared_memory import backend
from wanma.collectives.shared_memory.errors import SharedMemoryError, failure_text
from wanma.collectives.shared_memory.native_library import CollectiveStatus
from wanma.collectives.shared_memory.process_group import SharedMemoryProcessGroup
from wanma.elastic.failure import is_secondary_error
from wanma.elastic.workers.flight_recorder import read_collective_state
from wanma.job.run.worker import WorkerContext

RANKS, VICTIM = 3, 1
COLLECTIVES: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(3)),
    "long all_reduce": lambda: dist.all_reduce(torch.ones(100_000)),
    "all_gather_single": lambda: dist.all_gather_into_tensor(torch.ones(3 * RANKS), torch.ones(3)),
    "reduce_scatter_single": lambda: dist.reduce_scatter_tensor(torch.ones(3), torch.ones(3 * RANKS)),
    "broadcast": lambda: dist.broadcast(torch.ones(3), 0),
    "all_to_all": lambda: dist.all_to_all_single(torch.ones(RANKS), torch.ones(RANKS)),
    "barrier": lambda: dist.barrier(),
}
EVERY_DAY = ("all_reduce", "long all_reduce", "all_to_all")
"""Collectives whose peer is killed every day: short, in chunks, and without a sum."""
MESSAGES: dict[str, Callable[[], Any]] = {
    "recv": lambda: dist.recv(torch.ones(3), VICTIM),
    "recv of anybody": lambda: dist.recv(torch.ones(3)),
}
TIMEOUT_SECONDS = {signal.SIGKILL: 200.0, signal.SIGSTOP: 5.0}
"""Deadline of collectives; who is named because it has ended is named before."""


def outcomes(
    function: Any, ranks: int, arguments: tuple[Any, ...] = (), seconds: float = 150
) -> dict[int, Any]:
    """Results of `function(worker, *arguments)` of the ranks that lived to return one.

    Once all that are not stopped or dead have, the others are killed.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = _context.Queue()
    processes = [
        _context.Process(
            target=_rank, args=(function, rank, ranks, store.port, arguments, results), daemon=True
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    deadline = time.monotonic() + seconds
    while len(found) < ranks - 1 and time.monotonic() < deadline:
        try:
            rank, value = results.get(timeout=0.5)
            found[rank] = value
        except Empty:
            continue
    for process in processes:
        process.kill()
        process.join()
    return found


def _rank(function: Any, rank: int, ranks: int, port: int, arguments: tuple[Any, ...], results: Any) -> None:
    torch.set_num_threads(1)
    worker = WorkerContext(rank, rank, ranks, ranks, 0, 1, Path("/nowhere"), store_port=port)
    results.put((rank, function(worker, *arguments)))


def caught(run: Callable[[], Any]) -> tuple[str, float]:
    """The error's text, and how long it took to come."""
    began = time.monotonic()
    with pytest.raises(SharedMemoryError) as error:
        run()
    assert is_secondary_error(error.value), "a supervisor looks for another cause"
    return str(error.value), time.monotonic() - began


# ---------------------------------------------------------------- killed, stopped, left


def strike_in_each(worker: WorkerContext, strike: signal.Signals, name: str) -> tuple[str, float, str]:
    with shared_world(worker) as (group, _):
        COLLECTIVES[name]()
        group.set_timeout(timedelta(seconds=TIMEOUT_SECONDS[strike]))
        if worker.rank == VICTIM:
            # Others are waiting by then, and some of them asleep.
            time.sleep(0.2)
            os.kill(os.getpid(), strike)
        text, seconds = caught(COLLECTIVES[name])
        again, _ = caught(COLLECTIVES["barrier"])
        return text, seconds, again


@pytest.mark.parametrize(
    "name",
    [name if name in EVERY_DAY else pytest.param(name, marks=pytest.mark.full) for name in COLLECTIVES],
)
def test_a_killed_peer_is_named_at_once_in_each_collective(name: str) -> None:
    found = outcomes(strike_in_each, RANKS, (signal.SIGKILL, name))
    assert sorted(found) == [0, 2]
    for text, _, again in found.values():
        assert f"rank {VICTIM} has ended" in text
        assert f"{name.rpartition(' ')[2]} #2 of group " in text
        assert f"rank {VICTIM} has ended" in again, "the group is of no use any more, and says why"


def test_a_stopped_peer_is_named_when_time_is_over() -> None:
    found = outcomes(strike_in_each, RANKS, (signal.SIGSTOP, "all_reduce"))
    assert sorted(found) == [0, 2]
    for text, seconds, _ in found.values():
        assert f"all_reduce #2 of group default_pg: timed out waiting for rank {VICTIM} (5 s)" in text
        assert seconds >= TIMEOUT_SECONDS[signal.SIGSTOP] - 0.3


def strike_before_a_message(
    worker: WorkerContext, strike: signal.Signals, name: str
) -> tuple[str, float, str]:
    with shared_world(worker) as (group, _):
        dist.barrier()
        group.set_timeout(timedelta(seconds=TIMEOUT_SECONDS[strike]))
        if worker.rank == VICTIM:
            dist.send(torch.full((3,), 7.0), 0)
            time.sleep(0.2)
            os.kill(os.getpid(), strike)
        if worker.rank == 0:
            last = torch.zeros(3)
            dist.recv(last, VICTIM)
            assert last.tolist() == [7.0] * 3
        text, seconds = caught(MESSAGES[name])
        again, _ = caught(COLLECTIVES["barrier"])
        return text, seconds, again


@pytest.mark.parametrize("name", list(MESSAGES))
def test_a_killed_sender_is_named_at_once(name: str) -> None:
    found = outcomes(strike_before_a_message, RANKS, (signal.SIGKILL, name))
    assert sorted(found) == [0, 2]
    for rank, (text, _, again) in found.items():
        whom = "any rank" if name != "recv" else f"rank {VICTIM}"
        assert f"recv #{2 if rank == 0 else 1} from {whom} of group default_pg: " in text
        assert f"rank {VICTIM} has ended" in text
        assert f"rank {VICTIM} has ended" in again


def test_a_stopped_sender_is_named_when_time_is_over() -> None:
    found = outcomes(strike_before_a_message, RANKS, (signal.SIGSTOP, "recv"))
    assert sorted(found) == [0, 2]
    for text, seconds, _ in found.values():
        assert re.search(rf"timed out waiting for rank {VICTIM} \(5 s\)", text), text
        assert seconds >= TIMEOUT_SECONDS[signal.SIGSTOP] - 0.3


def send_and_leave(worker: WorkerContext) -> str:
    with shared_world(worker):
        dist.barrier()
        if worker.rank == VICTIM:
            dist.send(torch.full((3,), 7.0), 0)
            return "left"
        if worker.rank == 0:
            last = torch.zeros(3)
            time.sleep(0.3)  # the sender is gone by then
            dist.recv(last, VICTIM)
            assert last.tolist() == [7.0] * 3
            return caught(lambda: dist.send(torch.ones(3), VICTIM))[0]
        return caught(MESSAGES["recv"])[0]


def receive_another_size(worker: WorkerContext) -> str:
    with shared_world(worker):
        if worker.rank == 0:
            dist.send(torch.ones(4), 1)
            return caught(COLLECTIVES["barrier"])[0]
        return caught(lambda: dist.recv(torch.ones(3), 0))[0]


def test_a_message_of_another_size_is_an_error_on_both_sides() -> None:
    zero, one = run_ranks(receive_another_size, 2, (), is_reused=True)
    assert "recv #1 from rank 0 of group default_pg" in one
    for text in (zero, one):
        assert "with different sizes, types or roots" in text


def leave_early(worker: WorkerContext) -> str:
    with shared_world(worker):
        dist.barrier()
        if worker.rank == VICTIM:
            return "left"
        return caught(COLLECTIVES["all_reduce"])[0]


@pytest.mark.parametrize("rank_program", [leave_early, send_and_leave])
def test_a_peer_that_closed_its_group_is_named_and_its_messages_still_arrive(rank_program: Any) -> None:
    zero, one, two = run_ranks(rank_program, RANKS, (), is_reused=True)
    assert one == "left"
    for text in (zero, two):
        assert f"rank {VICTIM} has closed" in text


def abort(worker: WorkerContext) -> str:
    with shared_world(worker) as (group, _):
        dist.barrier()
        if worker.rank == VICTIM:
            time.sleep(0.2)
            group.abort()
            return caught(COLLECTIVES["barrier"])[0]
        return caught(COLLECTIVES["all_reduce"])[0]


def test_an_abort_wakes_all_who_wait() -> None:
    zero, one, two = run_ranks(abort, RANKS, (), is_reused=True)
    assert "this rank has closed its process group" in one
    assert "rank 1 has aborted its collectives" in zero
    assert "rank 1 has aborted its collectives" in two


def in_the_background(worker: WorkerContext) -> tuple[str, str]:
    with shared_world(worker):
        dist.barrier()
        if worker.rank == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        work = dist.all_reduce(torch.ones(100_000), async_op=True)
        text, _ = caught(work.wait)
        assert work.is_completed()
        assert not work.is_success()
        with pytest.raises(Exception, match="rank 1 has ended") as error:
            work.get_future().wait()
        return text, str(error.value)


def test_who_waits_later_hears_of_it_too() -> None:
    found = outcomes(in_the_background, RANKS)
    assert sorted(found) == [0, 2]
    for text, of_future in found.values():
        assert "rank 1 has ended" in text
        assert "rank 1 has ended" in of_future


# ---------------------------------------------------------------- different collectives


def differ(worker: WorkerContext, kind: str) -> str:
    with shared_world(worker):
        odd = worker.rank == VICTIM
        return caught(
            {
                "collective": COLLECTIVES["barrier" if odd else "all_reduce"],
                "size": lambda: dist.all_reduce(torch.ones(40_001 if odd else 40_000)),
                "type": lambda: dist.all_reduce(torch.ones(3, dtype=torch.int32 if odd else torch.float32)),
                "root": lambda: dist.broadcast(torch.ones(3), int(odd)),
                "parts": lambda: dist.all_to_all_single(
                    torch.ones(3), torch.ones(3), None, [2, 1, 0] if odd else None
                ),
            }[kind]
        )[0]


@pytest.mark.parametrize("kind", ["collective", "size", "type", "root", "parts"])
def test_ranks_in_different_collectives_are_an_error_and_not_a_wrong_sum(kind: str) -> None:
    zero, _, two = run_ranks(differ, RANKS, (kind,), is_reused=True)
    for text in (zero, two):
        assert re.search(
            r"rank \d and others called different collectives, or one with different sizes", text
        ), text


# ---------------------------------------------------------------- deadlines


def wait_a_little(worker: WorkerContext) -> tuple[str, float]:
    with shared_world(worker):
        total = torch.ones(3)
        if worker.rank == 1:
            dist.recv(torch.ones(1), 0)  # the other one has waited in vain
        work = dist.all_reduce(total, async_op=True)
        text = ""
        if worker.rank == 0:
            text, _ = caught(lambda: work.wait(timedelta(seconds=0.2)))
            dist.send(torch.ones(1), 1)
        work.wait()
        return text, float(total[0])


def test_whoever_waits_for_a_while_only_can_wait_again() -> None:
    (text, total), (_, other) = run_ranks(wait_a_little, 2, (), is_reused=True)
    assert "after 0.2 s; it is still in progress" in text
    assert total == other == 2.0


def stand(worker: WorkerContext) -> tuple[str, tuple[str, ...]]:
    with shared_world(worker):
        dist.all_reduce(torch.ones(3))
        if worker.rank == 0:
            work = dist.all_reduce(torch.ones(3), async_op=True)
            found = read_collective_state()
            dist.send(torch.ones(1), 1)  # only now the other one comes
            work.wait()
        else:
            found = read_collective_state()
            dist.recv(torch.ones(1), 0)
            dist.all_reduce(torch.ones(3))
        return found.current_collective, found.recent_collectives


def test_a_hang_report_names_the_collective_that_a_rank_is_in() -> None:
    (one, recent), (other, _) = run_ranks(stand, 2, (), is_reused=True)
    assert one == "all_reduce #2 of group default_pg"
    assert recent[-1] == "all_reduce #1 of group default_pg"
    assert other == ""


def test_errors_name_who_did_not_come() -> None:
    text = failure_text(CollectiveStatus.TIMED_OUT, "barrier #3 of group data", 1, [1, 4, 6], 0, 60)
    assert "barrier #3 of group data: " in text


# ---------------------------------------------------------------- what is left


def mapped(worker: WorkerContext) -> tuple[set[str], int, int]:
    with shared_world(worker) as (group, grid):
        kept = group.allocate_tensor(100_000, torch.float32)
        dist.all_reduce(kept.zero_())
        maps = Path("/proc/self/maps").read_text()
        inside = maps.count("memfd:wanma-collectives")
        del grid
        shared = {line.split()[-1] for line in maps.splitlines() if "/dev/shm" in line and "sem." not in line}
    kept.fill_(1.0)  # still there: the arena stays for as long as it has tensors
    del kept, group
    gc.collect()
    return shared, inside, Path("/proc/self/maps").read_text().count("memfd:wanma-collectives")


def test_nothing_has_a_name_and_all_is_gone_with_the_last_tensor() -> None:
    """No file of `/dev/shm` is mapped, and so none can be left there."""
    for shared, inside, after in run_ranks(mapped, 2, ()):
        assert shared == set()
        assert inside > 0
        assert after == 0


def memory(worker: WorkerContext) -> tuple[int, int]:
    from wanma.training.run.rank_memory import peak_rank_memory_bytes

    with shared_world(worker) as (group, _):
        before = peak_rank_memory_bytes("cpu")
        place = group.allocate_tensor(1 << 23, torch.float32)
        dist.all_reduce(place.fill_(1.0))
        return peak_rank_memory_bytes("cpu") - before, group.allocated_bytes


def test_a_rank_counts_its_own_tensors_in_shared_memory_once() -> None:
    for grown, allocated in run_ranks(memory, 3, ()):
        assert allocated == 32 << 20
        assert 32 << 20 <= grown < 48 << 20, "and not those of the two others"


# ---------------------------------------------------------------- without


def without(worker: WorkerContext, hosts: bool) -> tuple[str, float]:
    from wanma.job.plan.plan import Plan
    from wanma.parallel.mesh.parallel_mesh import open_mesh

    if hosts:
        backend.host_id = lambda: f"host {worker.rank}"
    elif worker.rank == 0:
        there_is_none()
    with open_mesh(worker, Plan(dp_replicate=2), 60):
        world = dist.group.WORLD
        assert world is not None
        assert not isinstance(world, SharedMemoryProcessGroup)
        total = torch.ones(5)
        dist.all_reduce(total)
        return backend.get_fallback_reason(world), float(total[0])


def test_without_a_compiler_and_across_hosts_it_is_gloo_and_says_so() -> None:
    told = "rank 0: no C++ compiler was found (apt-get install g++)"
    assert run_ranks(without, 2, (False,)) == [(told, 2.0)] * 2
    assert run_ranks(without, 2, (True,)) == [("the 2 ranks are on 2 nodes", 2.0)] * 2


def refuse(worker: WorkerContext) -> str:
    from wanma.job.errors import WanmaError

    backend.host_id = lambda: f"host {worker.rank}"
    with pytest.raises(WanmaError) as error, shared_world(worker):
        pass
    return str(error.value)


def test_shared_is_refused_with_the_way_out_where_it_cannot_be() -> None:
    for text in run_ranks(refuse, 2, ()):
        assert "the 2 ranks are on 2 nodes" in text
        assert "set parallel.collectives to 'auto'" in text
