"""Prefetching: same steps as without, bounded, and errors where they can be seen."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from wanma.data.datasets.dataset import BatchedDataset
from wanma.data.opening import open_dataset
from wanma.data.step_loader import StepLoader
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
    assert [step.samples_consumed_before for step in found] == [0, 4, 8, 12, 16, 20]
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


def test_a_rank_with_too_few_rows_gets_padding() -> None:
    with loader(
        Numbers(), Plan(dp_replicate=3, micro_batch=1), 2, train=TrainSection(steps=1, global_batch=4)
    ) as it:
        step = next(it)
    assert [batch.real.tolist() for batch in step.micro_batches] == [[True], [False]]


def test_no_more_than_prefetch_steps_are_loaded_ahead() -> None:
    seen: list[int] = []
    with loader(Numbers(seen.append), train=TrainSection(steps=50, global_batch=1), prefetch=3) as steps:
        next(steps)
        time.sleep(0.1)
        assert len(seen) <= 1 + 3
        next(steps)
        time.sleep(0.1)
        assert len(seen) <= 2 + 3


def test_loading_overlaps_with_training() -> None:
    with loader(Numbers(lambda _: time.sleep(0.02)), train=TrainSection(steps=8, global_batch=1)) as steps:
        next(steps)
        waited = 0.0
        for _ in range(7):
            time.sleep(0.06)  # the training
            start = time.perf_counter()
            next(steps)
            waited += time.perf_counter() - start
    assert waited < 7 * 0.02 / 2


def test_an_error_while_loading_surfaces_at_next_with_its_traceback() -> None:
    def fail(index: int) -> None:
        raise ValueError("broken sample")

    with loader(Numbers(fail)) as steps, pytest.raises(WanmaError, match="broken sample") as told:
        next(steps)
    assert "fail" in [entry.name for entry in trace(told.value)]
    assert loader_threads() == []


def trace(error: BaseException) -> list[Any]:
    import traceback

    assert error.__cause__ is not None
    return list(traceback.extract_tb(error.__cause__.__traceback__))


def test_close_joins_even_while_a_step_is_loading_and_twice_is_fine() -> None:
    steps = loader(Numbers(lambda _: time.sleep(0.05)))
    next(steps)
    steps.close()
    steps.close()
    assert loader_threads() == []
    with pytest.raises(StopIteration):
        next(steps)


def test_leaving_early_joins() -> None:
    with loader(Numbers()) as steps:
        for step in steps:
            if step.step == 2:
                break
    assert loader_threads() == []


def test_without_a_step_left_there_is_nothing_to_load() -> None:
    with loader(Numbers(), start=6) as steps:
        assert list(steps) == []
