"""Callbacks, an optimizer and a schedule that a loop of one's own is given as arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import wanma
from support.compare import same_numbers
from support.own import Numbers, Plain, seeded
from support.own_loop import session_job, started_by_launch
from support.ranks import Outcome, run_ranks
from wanma.job.errors import JobError, WanmaError
from wanma.job.run.worker import WorkerContext


class History(wanma.Callback):
    def __init__(self, stop_after: int = 0) -> None:
        self.told: list[Any] = []
        self.stop_after = stop_after

    def on_start(self, event: Any) -> None:
        self.told.append(event)

    on_validation = on_checkpoint = on_end = on_start

    def on_step(self, event: wanma.StepEnd) -> None:
        self.told.append(event)
        if event.step == self.stop_after:
            raise wanma.StopTraining("that will do")


class Broken(wanma.Callback):
    def on_start(self, event: wanma.RunStart) -> None:
        raise ZeroDivisionError("at the start")


def job(steps: int, **train: Any) -> dict[str, Any]:
    return session_job(
        train={"steps": steps, "validate_every_steps": 2, **train}, data={"validation_fraction": 0.25}
    )


def loop(folder: Path, asked: dict[str, Any], **arguments: Any) -> Outcome:
    threads = torch.get_num_threads()
    try:
        with wanma.session(asked, run_directory=folder, **arguments) as session:
            model = session.prepare(seeded(Plain))

            def losses(batch: wanma.Batch) -> Any:
                return session.losses(model(*batch.inputs), batch)

            for batch in session.batches(Numbers(), validate=losses):
                session.step(losses(batch))
    finally:
        torch.set_num_threads(threads)
    return Outcome(folder)


def test_callbacks_hear_a_session_from_its_start_to_its_end(tmp_path: Path) -> None:
    history = History()
    run = loop(tmp_path, job(4), callbacks=[history])
    kinds = [type(event).__name__ for event in history.told]
    assert (kinds[0], kinds[-1]) == ("RunStart", "RunEnd")
    assert [event.loss for event in history.told if isinstance(event, wanma.StepEnd)] == run.losses
    assert [event.step for event in history.told if isinstance(event, wanma.ValidationEnd)] == [2, 4]
    assert history.told[-1].outcome == "finished"


def test_a_callback_ends_a_session_in_order(tmp_path: Path) -> None:
    history = History(stop_after=3)
    run = loop(tmp_path, job(5_000), callbacks=[history])
    assert 3 <= len(run.steps) < 5_000
    assert history.told[-1].outcome == "interrupted"
    assert run.tensors(len(run.steps)), "it has saved its last step"


def test_a_callback_that_fails_ends_a_session_in_order_and_is_named(tmp_path: Path) -> None:
    with pytest.raises(WanmaError, match=r"Broken\.on_start .*ZeroDivisionError"):
        loop(tmp_path, job(5_000), callbacks=[Broken()])
    assert Outcome(tmp_path).tensors()


def test_callbacks_that_a_job_names_are_called_in_a_session(tmp_path: Path) -> None:
    asked = {**job(2), "observe": {"callbacks": [f"{__name__}:Broken"]}}
    with pytest.raises(WanmaError, match=r"callback Broken\.on_start failed"):
        loop(tmp_path, asked)


def test_an_optimizer_and_a_schedule_are_those_that_a_job_names(tmp_path: Path) -> None:
    factories = {"optimizer_factory": "torch.optim:RAdam", "schedule_factory": f"{__name__}:halved"}
    named = loop(tmp_path / "named", job(4, **factories))
    given = loop(tmp_path / "given", job(4), optimizer=torch.optim.RAdam, schedule=halved)
    usual = loop(tmp_path / "usual", job(4))
    same_numbers(named, given, tolerance=0.0)
    assert given.losses != usual.losses


def halved(step: int) -> float:
    return 0.5


def test_what_is_none_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for arguments, says in (
        (
            {"optimizer": torch.optim.SGD(Plain().parameters(), lr=1.0)},
            "built before its parameters are sharded",
        ),
        ({"schedule": 0.5}, "schedule is a float"),
        ({"callbacks": [print]}, "is not a wanma.Callback"),
    ):
        with pytest.raises(JobError, match=says):
            loop(tmp_path / "run", job(2), **arguments)
    with pytest.raises(JobError, match=r"train\.optimizer_factory of the job"):
        loop(tmp_path / "run", job(2, optimizer_factory="torch.optim:RAdam"), optimizer=torch.optim.RAdam)
    with pytest.raises(JobError, match=r"servers\.count"):
        loop(tmp_path / "run", {**job(2), "servers": {"count": 1}})
    assert not (tmp_path / "run").exists()


def test_a_callback_of_rank_0_ends_all_ranks_at_one_step(tmp_path: Path) -> None:
    told = run_ranks(_on_two_ranks, 2, (tmp_path,), is_reused=True)
    assert told[1] == [], "other ranks call none"
    assert [told[0][0], told[0][-1]] == ["RunStart", "RunEnd"]
    assert len(Outcome(tmp_path).steps) < 5_000


def _on_two_ranks(worker: WorkerContext, directory: Path) -> list[str]:
    history = History(stop_after=3)
    with started_by_launch(worker, directory):
        loop(directory, {**job(5_000), "parallel": {"dp_replicate": 2}}, callbacks=[history])
    return [type(event).__name__ for event in history.told]
