"""Training on what can only be iterated over: the same numbers on every layout and after every stop."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from support.compare import same_numbers
from support.own import Numbers, Plain, seeded
from support.own_loop import session_job
from support.ranks import run_here, run_job
from wanma.checkpoint.store.checkpoint_folder import read_manifest
from wanma.job.plan.plan import Plan


class Resumable:
    """Rows in their order; it can begin at any of them."""

    def __init__(self) -> None:
        self.rows = Numbers()
        self.at = self.first = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["at"]

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.first, len(self.rows)):
            self.at = number + 1
            yield self.rows[number]


class Rows:
    """The same without anything else."""

    def __iter__(self) -> Iterator[Any]:
        rows = Numbers()
        yield from (rows[number] for number in range(len(rows)))


class Split(Rows):
    """Each rank has its own part."""

    def __iter__(self) -> Iterator[Any]:
        rank = dist.get_rank() if dist.is_initialized() else 0
        yield from list(super().__iter__())[rank:]


PLAN = Plan(micro_batch=7, precision="fp64")


def job(**train: Any) -> dict[str, Any]:
    return session_job(train={"steps": 12, **train}, checkpoint={"every_steps": 3, "keep": 9})


def test_two_ranks_train_as_one_over_epochs(tmp_path: Path) -> None:
    given = {"model": seeded(Plain), "data": (Rows(), Numbers(size=5))}
    one = run_here(tmp_path / "one", job(), PLAN, given)
    two = run_job(tmp_path / "two", job(), Plan(dp_replicate=2, micro_batch=2, precision="fp64"), given)
    same_numbers(one, two, tolerance=1e-10)


@pytest.mark.parametrize("stream", [Rows(), Resumable()], ids=["rows", "with a state"])
def test_a_stopped_run_is_as_if_never_stopped(stream: Any, tmp_path: Path) -> None:
    given = {"model": seeded(Plain), "data": stream}
    whole = run_here(tmp_path / "whole", job(), PLAN, given)
    shutil.copytree(whole.directory, tmp_path / "again")
    for step in (9, 12):
        shutil.rmtree(tmp_path / "again" / "checkpoints" / f"step-{step:08d}")
    state = read_manifest(tmp_path / "again" / "checkpoints" / "step-00000006").state
    assert (state["stream"] != {}) == isinstance(stream, Resumable)
    again = run_here(tmp_path / "again", job(), PLAN, given)
    same_numbers(whole, again, tolerance=0.0)


def test_validation_without_a_validation_part_is_told(tmp_path: Path) -> None:
    given = {"model": seeded(Plain), "data": Rows()}
    run = run_here(tmp_path, job(steps=2, validate_every_steps=1), PLAN, given)
    events = (run.directory / "events.jsonl").read_text()
    told = "train.validate_every_steps = 1 without effect: the data has no validation part"
    assert events.count(told) == 1


def test_a_stream_that_splits_itself_is_refused(tmp_path: Path) -> None:
    given = {"model": seeded(Plain), "data": Split()}
    plan = Plan(dp_replicate=2, micro_batch=4, precision="fp64")
    with pytest.raises(AssertionError, match=r"Split .* on rank 1 than on rank 0"):
        run_job(tmp_path, job(), plan, given)


def numbers_of_the_rank() -> Numbers:
    return Numbers(seed=dist.get_rank())


def test_ranks_with_other_data_are_refused(tmp_path: Path) -> None:
    plan = Plan(dp_replicate=2, micro_batch=4, precision="fp64")
    made = job()
    made["data"] = {"factory": f"{__name__}:numbers_of_the_rank"}
    with pytest.raises(AssertionError, match="data: rank 1 has other data than rank 0"):
        run_job(tmp_path, made, plan, {"model": seeded(Plain)})
