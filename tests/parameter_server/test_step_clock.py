from __future__ import annotations

import random

import pytest

from wanma.parameter_server.step_clock import StepClock


def begun(
    workers: int, pause_step: int = 100, *, synchronous: bool = False, bound: int | None = None
) -> StepClock:
    clock = StepClock(workers, is_synchronous=synchronous, staleness=bound)
    clock.begin(0, 0, pause_step)
    return clock


def test_synchronous_workers_share_each_step() -> None:
    clock = begun(2, synchronous=True)
    assert clock.try_start(1) == 0
    assert clock.finish(1, 0) == [], "the other has not begun"
    assert clock.try_start(1) is None
    assert clock.try_start(0) == 0
    assert clock.finish(0, 0) == [0, 1]
    assert clock.apply([0, 1], applied=True) == 0
    assert (clock.try_start(0), clock.try_start(1)) == (1, 1)


def test_asynchronous_workers_take_steps_of_their_own_and_wait_for_none() -> None:
    clock = begun(2)
    assert (clock.try_start(0), clock.try_start(1)) == (0, 1)
    for step in range(2, 6):
        assert clock.finish(1, step - 1) == [1]
        assert clock.apply([1], applied=True) == 0
        assert clock.try_start(1) == step
    assert clock.finish(0, 0) == [0]
    assert clock.apply([0], applied=True) == 4, "so many updates of the other"


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_update_misses_more_than_the_bound(bound: int) -> None:
    dice = random.Random(bound)
    clock, flights = begun(4, 300, bound=bound), dict[int, int]()
    while not clock.is_paused:
        worker = dice.randrange(4)
        if worker not in flights:
            if (step := clock.try_start(worker)) is not None:
                flights[worker] = step
        elif worker or dice.random() < 0.1:  # worker 0 is slow
            assert clock.finish(worker, flights.pop(worker)) == [worker]
            clock.apply([worker], applied=True)
    assert clock.steps == clock.updates == sum(clock.staleness.values()) == 300
    assert max(clock.staleness) == min(bound, 3) if bound < 3 else max(clock.staleness) <= bound


def test_steps_of_workers_that_ended_are_computed_by_others_each_once() -> None:
    clock = begun(3, 5)
    assert [clock.try_start(worker) for worker in range(3)] == [0, 1, 2]
    clock.finish(1, 1)
    clock.apply([1], applied=True)
    clock.abandon()
    steps = []
    while (step := clock.try_start(0)) is not None:
        steps.append(step)
        clock.finish(0, step)
        clock.apply([0], applied=True)
    assert steps == [0, 2, 3, 4]
    assert clock.is_paused


def test_a_pause_comes_after_the_steps_in_progress() -> None:
    clock = begun(2)
    assert (clock.try_start(0), clock.try_start(1)) == (0, 1)
    clock.pause()
    clock.finish(1, 1)
    clock.apply([1], applied=False)
    assert clock.try_start(1) is None
    assert not clock.is_paused
    clock.finish(0, 0)
    clock.apply([0], applied=True)
    assert (clock.is_paused, clock.steps, clock.updates) == (True, 2, 1)


def test_reserved_steps_are_those_of_their_worker_until_there_are_no_others() -> None:
    clock = begun(2, 8)
    assert clock.try_start(0) == 0
    assert clock.reserve(0, 2) == [1, 2]
    for step in (3, 4, 5, 6, 7, 2, 1):
        assert clock.try_start(1) == step
        clock.finish(1, step)
        clock.apply([1], applied=True)
    assert clock.reserve(0, 2) == []
    assert clock.try_start(1) is None


@pytest.mark.parametrize("seed", range(5))
def test_each_step_is_applied_once_whoever_reserved_it(seed: int) -> None:
    dice = random.Random(seed)
    clock, flights, applied = begun(3, 60), dict[int, int](), list[int]()
    pauses = 0
    while not (clock.is_paused and clock.steps == 60):
        if clock.is_paused:
            assert sorted(applied) == list(range(clock.pause_step)), "the position is one number"
            clock.pause_step = 60
        worker = dice.randrange(3)
        if dice.random() < 0.02:
            clock.abandon()
            flights.clear()
        elif dice.random() < 0.02 and clock.steps < 50:
            clock.pause()
            pauses += 1
        elif worker not in flights:
            if (step := clock.try_start(worker)) is not None:
                flights[worker] = step
                upcoming = clock.reserve(worker, 4)
                assert len(upcoming) <= 4
                assert not {step, *upcoming} & {*applied}
        elif worker or dice.random() < 0.1:  # worker 0 is slow
            applied.append(flights.pop(worker))
            assert clock.finish(worker, applied[-1]) == [worker]
            clock.apply([worker], applied=True)
    assert sorted(applied) == list(range(60))
    assert pauses
