"""Prefetching: same steps as without, bounded, and errors where they can be seen."""

import itertools
import queue
import threading
import time
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wanma.data import step_loader
from wanma.data.datasets.dataset import BatchedDataset
from wanma.data.opening import open_dataset
from wanma.data.step_loader import StepBatches, StepLoader
from wanma.job.errors import WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.sections.data import DataSection
from wanma.job.sections.train import TrainSection


class Numbers:
    def __init__(self, on_item: Callable[[int], None] = lambda _: None) -> None:
        self.on_item = on_item

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[float, int]:
        self.on_item(index)
        return float(index), index


def loader(
    data: BatchedDataset | Any,
    plan: Plan = Plan(),  # noqa: B008
    rank: int = 0,
    start: int = 0,
    **values: Any,
) -> StepLoader:
    train = values.pop("train", TrainSection(steps=6, global_batch=4))
    if not isinstance(data, BatchedDataset):
        data = open_dataset(DataSection(validation_fraction=0, workers=2), train, data)
    return StepLoader(data, plan, train, rank, start, **{"prefetch": 2, "threads": 1, **values})


def loader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("wanma-loader")]


@pytest.mark.parametrize("threads", [1, 3])
def test_steps_come_in_order_and_equal_those_loaded_by_hand(threads: int) -> None:
    with loader(Numbers(), threads=threads, prefetch=4) as steps:
        found = list(steps)
        by_hand = [steps.load(step) for step in range(6)]
    assert [step.step for step in found] == list(range(6))
    for one, other in zip(found, by_hand, strict=True):
        assert [b.samples.tolist() for b in one.micro_batches] == [
            b.samples.tolist() for b in other.micro_batches
        ]
        assert [b.targets.tolist() for b in one.micro_batches] == [
            b.targets.tolist() for b in other.micro_batches
        ]


def test_ranks_share_each_step_and_a_resumed_run_goes_on_where_it_was() -> None:
    plan = Plan(dp_replicate=3, micro_batch=2)
    train = TrainSection(steps=4, global_batch=4, batch_ramp=[(2, 8)])
    ranks = []
    for rank in range(3):
        with loader(Numbers(), plan, rank, start=1, train=train) as steps:
            ranks.append(list(steps))
    assert [step.step for step in ranks[0]] == [1, 2, 3]
    for number, (before, size) in enumerate([(4, 4), (8, 8), (16, 8)]):
        parts = [rank[number] for rank in ranks]
        assert {part.global_batch_size for part in parts} == {size}
        assert len({len(part.micro_batches) for part in parts}) == 1
        samples = torch.cat([b.samples[b.real] for part in parts for b in part.micro_batches])
        assert samples.tolist() == list(range(before, before + size))


def test_another_plan_counts_from_the_next_step_on_whatever_was_loaded_ahead() -> None:
    even = Plan(dp_replicate=2, micro_batch=2)
    moved = even.with_changes(batch_shares=(3, 1))
    with loader(Numbers(), plan=even, prefetch=4) as steps:
        found = [next(steps), next(steps)]
        steps.switch_plan(moved)
        steps.switch_plan(moved)
        found += list(steps)
    assert [step.step for step in found] == list(range(6))
    rows = [[row for batch in step.micro_batches for row in batch.samples.tolist()] for step in found]
    assert rows == [[0, 1], [4, 5], [8, 9, 10], [12, 13, 14], [16, 17, 18], [20, 21, 22]]
    assert [len(step.micro_batches) for step in found] == [1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_step_that_was_looked_at_comes_next_under_any_plan(prefetch: int) -> None:
    whole, halves = Plan(micro_batch=4), Plan(micro_batch=2)
    with loader(Numbers(), whole, prefetch=prefetch) as steps:
        assert next(steps).step == 0
        following = steps.peek()
        assert following.step == 1
        assert steps.peek() is next(steps) is following
        assert steps.peek() is not None
        steps.switch_plan(halves)
        step = next(steps)
        assert (step.step, len(step.micro_batches)) == (2, 2)
        assert [step.step for step in steps] == [3, 4, 5]
        assert steps.peek() is None


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_loop_that_computes_other_steps_gets_them_and_loads_again_what_differs(
    monkeypatch: pytest.MonkeyPatch, prefetch: int
) -> None:
    train, loaded, load = TrainSection(steps=20, global_batch=1), list[int](), StepLoader.load

    def note(self: StepLoader, step: int) -> StepBatches:
        loaded.append(step)
        return load(self, step)

    monkeypatch.setattr(StepLoader, "load", note)
    with loader(Numbers(), train=train, prefetch=prefetch) as steps:
        for expected in ([3, 5, 7], [5, 7, 8], [7, 9], [9]):
            steps.follow(expected)
            step = next(steps)
            (row,) = step.micro_batches[0].samples.tolist()
            assert step.step == row == expected[0]
        with pytest.raises(StopIteration):
            next(steps)
        steps.follow(range(11, 20))
        assert [step.step for step in steps] == list(range(11, 20))
    assert {3, 5, 7, 9, *range(11, 20)} <= set(loaded) <= {3, 5, 7, 8, 9, *range(11, 20)}
    assert len(loaded) == len(set(loaded)), "what agrees is not loaded again"


def test_loading_overlaps_with_training() -> None:
    loaded: queue.Queue[int] = queue.Queue()
    with loader(Numbers(loaded.put), train=TrainSection(steps=8, global_batch=1)) as steps:
        next(steps)
        loaded.get(timeout=60)
        for _ in range(7):
            loaded.get(timeout=60)  # the training: the next step is loaded though nobody waits for it
            next(steps)


class LatePool:
    """Threads that load a step only when it is waited for."""

    def __init__(self) -> None:
        self.submitted: list[int] = []

    def submit(self, load: Callable[[int], StepBatches], step: int) -> Any:
        self.submitted.append(step)
        return SimpleNamespace(done=lambda: False, result=lambda: load(step), cancel=lambda: True)

    def shutdown(self, **_: bool) -> None:
        """Nothing runs."""


@pytest.mark.parametrize(
    ("prefetch", "limit", "depth"), [("auto", 90, 64), ("auto", 5, 5), (2, 90, 2), (2, 0, 1)]
)
def test_a_loop_that_waits_gets_more_steps_ahead_up_to_a_size(
    prefetch: Any, limit: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = TrainSection(steps=90, global_batch=1)
    with loader(Numbers(), train=train) as steps:
        size = limit * steps.load(0).memory_bytes
    with loader(Numbers(), train=train, prefetch_bytes=size, prefetch=prefetch) as steps:
        steps._pool.shutdown()
        monkeypatch.setattr(steps, "_pool", pool := LatePool())
        ahead = []
        for step in range(20):
            assert next(steps).step == step
            ahead.append(len(pool.submitted) - step - 1)
    assert max(ahead) == depth


@pytest.mark.parametrize(("copies", "handover"), [(True, 1e9), (True, 0.0), (False, 1e9)])
def test_a_loop_that_waits_for_quick_steps_loads_them_itself(
    copies: bool, handover: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_loader, "_HANDOVER_SECONDS", handover)
    monkeypatch.setattr(step_loader, "_DIRECT_STEPS", 5)
    train = TrainSection(steps=40, global_batch=4)
    data = open_dataset(DataSection(validation_fraction=0), train, Numbers())
    monkeypatch.setattr(type(data), "copies_from_memory", copies)
    pool = LatePool()
    with loader(data, train=train, prefetch=2) as steps:
        steps._pool.shutdown()
        monkeypatch.setattr(steps, "_pool", pool)
        found = [next(steps) for _ in range(20)]
        steps.switch_plan(Plan(micro_batch=2))
        found += list(steps)
    assert [step.step for step in found] == list(range(40))
    assert [len(step.micro_batches) for step in found] == [4] * 20 + [2] * 20
    for step in found:
        samples = [sample for batch in step.micro_batches for sample in batch.samples.tolist()]
        assert samples == list(range(4 * step.step, 4 * step.step + 4))
    own = [later - step - 1 for step, later in itertools.pairwise(sorted(set(pool.submitted)))]
    assert [count for count in own if count][:2] == ([5, 10] if copies and handover > 0 else []), (
        "threads go on, each time later"
    )


def test_steps_that_are_there_in_time_are_never_loaded_by_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_loader, "_HANDOVER_SECONDS", 1e9)
    train = TrainSection(steps=30, global_batch=4)
    data = open_dataset(DataSection(validation_fraction=0), train, Numbers())
    monkeypatch.setattr(type(data), "copies_from_memory", True)
    threads = []
    load = StepLoader.load

    def note(self: StepLoader, step: int) -> StepBatches:
        threads.append(threading.current_thread().name)
        return load(self, step)

    monkeypatch.setattr(StepLoader, "load", note)
    with loader(data, train=train, prefetch=2) as steps:
        for _ in steps:
            for future in list(steps._prefetched):
                future.result()  # a training step, in which all of them end
    assert len(threads) == 30
    assert all(name.startswith("wanma-loader") for name in threads)


def test_an_error_while_loading_surfaces_at_next_with_its_traceback() -> None:
    def fail(index: int) -> None:
        raise ValueError("broken sample")

    with loader(Numbers(fail)) as steps, pytest.raises(WanmaError, match="broken sample") as told:
        next(steps)
    frames = traceback.extract_tb(told.value.__cause__.__traceback__)
    assert "fail" in [frame.name for frame in frames]
    assert loader_threads() == []


def test_close_joins_even_while_a_step_is_loading_and_twice_is_fine() -> None:
    steps = loader(Numbers(lambda _: time.sleep(0.05)))
    next(steps)
    steps.close()
    steps.close()
    assert loader_threads() == []
    with pytest.raises(StopIteration):
        next(steps)
