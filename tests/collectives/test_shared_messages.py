"""Messages between two ranks over shared memory, on real processes."""

from __future__ import annotations

import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from support.ranks import run_ranks
from support.shared import shared_world
from wanma.collectives.shared_memory import backend, point_to_point
from wanma.collectives.shared_memory.errors import SharedMemoryError
from wanma.elastic.workers.flight_recorder import read_collective_state
from wanma.job.run.worker import WorkerContext

SIZES = (0, 1, 7, 4096, 300_001)


def everybody_to_everybody(worker: WorkerContext) -> None:
    """Itself included; all are asked for before any is waited for."""
    ranks, me = worker.world_size, worker.rank
    with shared_world(worker):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
            for size in SIZES:

                def content(source: int, target: int, size: int = size, dtype: torch.dtype = dtype):
                    return (torch.arange(size) + 10 * source + target).remainder(251).to(dtype)

                got = [torch.zeros(size, dtype=dtype) for _ in range(ranks)]
                works = [dist.irecv(got[peer], peer) for peer in range(ranks)]
                works += [dist.isend(content(me, peer), peer) for peer in range(ranks)]
                for work in works:
                    work.wait()
                for peer in range(ranks):
                    assert torch.equal(got[peer], content(peer, me)), (dtype, size, peer)


@pytest.mark.parametrize("ranks", [2, 3])
def test_messages_of_every_type_and_size_arrive_as_they_were_sent(ranks: int) -> None:
    run_ranks(everybody_to_everybody, ranks, (), is_reused=True)


def in_another_order(worker: WorkerContext) -> list[float]:
    """Tags are told apart; within one, order is kept, whoever is waited for first."""
    with shared_world(worker):
        sent = [(1, 1.0), (2, 2.0), (1, 3.0), (2, 4.0)]
        if worker.rank == 0:
            for tag, value in sent:
                dist.send(torch.tensor([value]), 1, tag=tag)
            return []
        got = [torch.zeros(1) for _ in sent]
        second, first = dist.irecv(got[0], 0, tag=2), dist.irecv(got[1], 0, tag=1)
        third, fourth = dist.irecv(got[2], 0, tag=1), dist.irecv(got[3], 0, tag=2)
        for work in (third, fourth, second, first):
            work.wait()
        assert first.is_completed()
        return [float(tensor) for tensor in got]


def test_tags_are_told_apart_and_order_is_kept_within_one() -> None:
    assert run_ranks(in_another_order, 2, (), is_reused=True)[1] == [2.0, 1.0, 3.0, 4.0]


def of_anybody(worker: WorkerContext) -> list[int]:
    with shared_world(worker):
        if worker.rank:
            dist.send(torch.tensor([worker.rank]), 0)
            return []
        found = []
        for _ in range(worker.world_size - 1):
            got = torch.zeros(1, dtype=torch.int64)
            found.append(dist.recv(got))
            assert found[-1] == int(got)
        return sorted(found)


def test_a_message_of_anybody_tells_whose_it_is() -> None:
    assert run_ranks(of_anybody, 3, (), is_reused=True)[0] == [1, 2]


def far_too_many(worker: WorkerContext, count: int, elements: int) -> tuple[float, int]:
    """Both send all of theirs before either takes any."""
    peer = 1 - worker.rank
    with shared_world(worker) as (group, _):
        sends = [dist.isend(torch.full((elements,), float(at)), peer) for at in range(count)]
        got, total = torch.zeros(elements), 0.0
        for at in range(count):
            dist.recv(got, peer)
            assert got.unique().tolist() == [float(at)]
            total += float(got[0])
        for work in sends:
            work.wait()
        dist.barrier()
        return total, group.allocated_bytes


def test_more_messages_than_a_channel_takes_wait_for_room() -> None:
    count = 2500
    for total, _ in run_ranks(far_too_many, 2, (count, 3), is_reused=True):
        assert total == sum(range(count))


def in_a_small_heap(worker: WorkerContext) -> tuple[float, int]:
    backend.compute_default_heap_bytes = lambda _: 1 << 20
    return far_too_many(worker, 20, 50_000)


def test_messages_that_the_heap_has_no_room_for_wait_until_others_were_taken() -> None:
    for total, allocated in run_ranks(in_a_small_heap, 2, ()):
        assert total == sum(range(20))
        assert allocated <= 1 << 20


def again_and_again(worker: WorkerContext) -> int:
    peer = 1 - worker.rank
    with shared_world(worker) as (group, _):
        got = torch.zeros(250_000)
        for _ in range(100):
            own = torch.ones(250_000)
            works = [dist.isend(own, peer), dist.irecv(got, peer)]
            works[0].wait()
            own.zero_()  # it is the sender's again
            works[1].wait()
            assert got.min() == 1.0
        return group.allocated_bytes


def test_places_of_messages_are_used_again() -> None:
    for allocated in run_ranks(again_and_again, 2, (), is_reused=True):
        assert allocated <= 4 << 20


def kept(worker: WorkerContext) -> int:
    """Tensors that somebody else than this function still has."""
    peer = 1 - worker.rank
    with shared_world(worker):
        tensors = []
        for _ in range(5):
            own, got = torch.ones(100), torch.zeros(100)
            tensors += [weakref.ref(own), weakref.ref(got)]
            for work in (dist.isend(own, peer), dist.irecv(got, peer)):
                work.wait()
        del own, got, work
        return sum(tensor() is not None for tensor in tensors)


def test_tensors_are_let_go_of_when_their_messages_are_through() -> None:
    assert run_ranks(kept, 2, (), is_reused=True) == [0, 0]


def look_first(worker: WorkerContext) -> tuple[bool, bool, float, str]:
    with shared_world(worker):
        if worker.rank == 0:
            dist.barrier()
            dist.send(torch.tensor([5.0]), 1)
            dist.send(torch.tensor([6.0]), 1)
            return False, True, 0.0, ""
        got, later = torch.zeros(1), torch.zeros(1)
        work, last = dist.irecv(got, 0), dist.irecv(later, 0)
        before = work.is_completed()
        assert read_collective_state().current_collective == "", "asked for, and not waited for"
        with pytest.raises(SharedMemoryError, match=r"recv #1 from rank 0 .* in progress"):
            work.wait(timedelta(seconds=0.05))
        where = []
        thread = threading.Thread(target=lambda: work.wait())
        thread.start()
        while not where:
            where = (
                [read_collective_state().current_collective]
                if read_collective_state().current_collective
                else []
            )
        future = last.get_future()
        dist.barrier()
        assert float(future.wait()[0]) == 6.0
        thread.join()
        return before, work.is_completed(), float(got), where[0]


def test_a_message_can_be_looked_for_waited_for_a_while_and_be_a_future() -> None:
    before, after, value, where = run_ranks(look_first, 2, (), is_reused=True)[1]
    assert (before, after, value) == (False, True, 5.0)
    assert where == "recv #1 from rank 0 of group default_pg", "the hang report tells it"


def beside_collectives(worker: WorkerContext) -> float:
    """A collective under way and messages do not wait for each other."""
    with shared_world(worker):
        total = torch.ones(100_000)
        if worker.rank == 0:
            work = dist.all_reduce(total, async_op=True)
            dist.send(torch.ones(5), 1)  # the other one begins its part only then
        else:
            dist.recv(torch.ones(5), 0)
            work = dist.all_reduce(total, async_op=True)
        objects = [None]
        if worker.rank == 0:
            dist.send_object_list([{"a": 1}], 1)
            objects = [{"a": 1}]
        else:
            dist.recv_object_list(objects, 0)
        assert objects == [{"a": 1}]
        work.wait()
        return float(total.mean())


def test_messages_and_collectives_do_not_wait_for_each_other() -> None:
    assert run_ranks(beside_collectives, 2, (), is_reused=True) == [2.0, 2.0]


def send_and_do_something_else(worker: WorkerContext) -> float:
    """More than there is room for, and then a collective: somebody goes on sending."""
    with shared_world(worker):
        total = 0.0
        if worker.rank == 0:
            works = [dist.isend(torch.full((3,), float(at)), 1) for at in range(1500)]
            dist.barrier()
            assert all(work is not None and work.wait() for work in works)
        else:
            got = torch.zeros(3)
            for _ in range(1500):
                dist.recv(got, 0)
                total += float(got[0])
            dist.barrier()
        return total


def test_what_found_no_room_is_sent_while_its_sender_does_something_else() -> None:
    assert run_ranks(send_and_do_something_else, 2, (), is_reused=True)[1] == sum(range(1500))


def one_tag_long_before(worker: WorkerContext) -> int:
    """Places of messages that were taken are free, though an earlier one of another tag was not."""
    point_to_point.MAX_QUEUED_BYTES = 1 << 20
    with shared_world(worker) as (group, _):
        if worker.rank == 0:
            dist.send(torch.ones(1), 1, tag=9)
            for _ in range(100):
                dist.send(torch.ones(50_000), 1)
        else:
            early = dist.irecv(torch.zeros(1), 0, tag=9)
            for _ in range(100):
                dist.recv(torch.zeros(50_000), 0)
            early.wait()
        dist.barrier()
        return group.allocated_bytes


def test_a_message_that_waits_keeps_no_room_of_later_ones() -> None:
    allocated, _ = run_ranks(one_tag_long_before, 2, ())
    assert allocated <= 2 << 20


def leave_one_by_one(worker: WorkerContext) -> list[int]:
    """Whoever has sent leaves; anybody's messages go on."""
    with shared_world(worker):
        dist.barrier()
        if worker.rank == 0:
            got = torch.zeros(1)
            return sorted(dist.recv(got) for _ in range(worker.world_size - 1))
        if worker.rank == 2:
            time.sleep(0.5)  # the other one is gone by then
        dist.send(torch.ones(1), 0)
        return []


def test_a_message_of_anybody_may_come_when_others_have_left() -> None:
    assert run_ranks(leave_one_by_one, 3, (), is_reused=True)[0] == [1, 2]


def gone(worker: WorkerContext) -> tuple[bool, str]:
    """A sender that has left is seen by whoever only looks."""
    with shared_world(worker):
        dist.barrier()
        if worker.rank == 1:
            return True, ""
        work = dist.irecv(torch.zeros(1), 1)
        until = time.monotonic() + 200
        while not work.is_completed() and time.monotonic() < until:
            time.sleep(0.01)
        return work.is_success(), str(work.exception())


def test_a_failed_message_looks_failed() -> None:
    success, text = run_ranks(gone, 2, (), is_reused=True)[0]
    assert not success
    assert "rank 1 has closed its process group" in text


def of_a_collective(worker: WorkerContext) -> float:
    """A tensor that a collective has not brought yet can be sent."""
    with shared_world(worker):
        world = dist.group.WORLD
        assert world is not None
        total = functional.all_reduce(torch.ones(5), "sum", world)
        got = torch.zeros(5)
        works = [dist.isend(total, 1 - worker.rank), dist.irecv(got, 1 - worker.rank)]
        for work in works:
            work.wait()
        return float(got.sum())


def test_what_a_collective_is_still_bringing_can_be_sent() -> None:
    assert run_ranks(of_a_collective, 2, (), is_reused=True) == [10.0, 10.0]


def refuse(worker: WorkerContext) -> None:
    with shared_world(worker) as (group, _):
        for message in (group.send, group.recv):
            for peer, tag, fact in (
                (-1, 0, "rank -1 in"),
                (2, 0, "rank 2 in"),
                (0, -1, "tag"),
                (0, 1 << 31, "tag"),
            ):
                with pytest.raises(ValueError, match=fact):
                    message([torch.ones(1)], peer, tag)
        for posted, part in ((dist.isend, torch.ones(4, 4).t()), (dist.irecv, torch.ones(4, 4)[:, 1])):
            with pytest.raises(ValueError, match="contiguous"):
                posted(part, 0)


def test_what_does_not_lie_in_one_piece_is_refused() -> None:
    run_ranks(refuse, 2, (), is_reused=True)
