"""Callbacks: called in the process that started the run, with records; they may stop it, not change it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import wanma
from support.own import Numbers, Plain, seeded
from wanma.api.run.callback_thread import CallbackThread, check_callbacks, load_callbacks
from wanma.job.errors import JobError, WanmaError
from wanma.job.run.run_directory import RunDirectory

STEPS = 2_000


class History(wanma.Callback):
    """All that it is told, in order."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_start(self, event: wanma.RunStart) -> None:
        self.told.append(event)

    on_step = on_validation = on_checkpoint = on_end = on_start  # type: ignore[assignment]

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.told if isinstance(event, kind)]


class StopsAfter(wanma.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, event: wanma.StepEnd) -> None:
        if event.step == self.step:
            raise wanma.StopTraining("that will do")


class Broken(wanma.Callback):
    def on_checkpoint(self, event: wanma.CheckpointEnd) -> None:
        raise ZeroDivisionError(f"of step {event.step}")


class StopsNever(wanma.Callback):
    def on_stepp(self, event: object) -> None:
        raise wanma.StopTraining


def train(folder: Path, *callbacks: wanma.Callback, **train: Any) -> wanma.Result:
    job = {
        "train": {
            "steps": STEPS,
            "global_batch": 4,
            "validate_every_steps": 3,
            "validation_samples": 4,
            **train,
        },
        "observe": {"console": "quiet"},
        "cluster": {"device": "cpu"},
    }
    return wanma.train(job, model=seeded(Plain), data=Numbers(), callbacks=callbacks, run_directory=folder)


def test_a_callback_sees_the_run_stops_it_and_is_named_when_it_fails(tmp_path: Path) -> None:
    history = History()
    result = train(tmp_path, history, StopsAfter(4))
    assert result.exit_code == 130
    steps = history.of(wanma.StepEnd)
    assert 4 < len(steps) < STEPS
    assert [event.step for event in steps] == list(range(1, len(steps) + 1))
    assert (history.told[0].step, history.told[0].ranks, history.told[0].run) == (0, 1, tmp_path)
    validations = history.of(wanma.ValidationEnd)
    assert [event.step for event in validations] == list(range(3, len(steps) + 1, 3))
    assert set(validations[0].metrics) == {"accuracy"}
    assert history.told[-1] == wanma.RunEnd(len(steps), "interrupted")
    assert [event.path.is_dir() for event in history.of(wanma.CheckpointEnd)] == [True]
    events = (tmp_path / "events.jsonl").read_text()
    assert "StopsAfter" in events or "interrupted" in events

    again = History()
    with pytest.raises(WanmaError, match=r"Broken.on_checkpoint .*of step \d+\n") as told:
        train(tmp_path, again, Broken(), steps=len(steps) + 2)
    assert "test_callbacks.py" in str(told.value)
    assert again.told[0].step == len(steps)
    # The last checkpoint's callback failed: the request to stop may come before the ranks leave, or after.
    assert again.told[-1].outcome in {"finished", "interrupted"}


def event(kind: str, **fields: Any) -> dict[str, Any]:
    numbers = {"loss": 1.0, "grad_norm": 2.0, "learning_rate": 0.1, "samples": 4, "step_seconds": 0.5}
    return {"kind": kind, "step": 3, **numbers, **fields}


def test_one_that_fails_is_not_called_again_and_the_others_are(tmp_path: Path) -> None:
    history = History()

    class Fails(History):
        def on_step(self, event: wanma.StepEnd) -> None:
            super().on_start(event)  # type: ignore[arg-type]
            raise ValueError("no")

    fails = Fails()
    with CallbackThread([fails, history], RunDirectory(tmp_path)) as called:
        called.on_event(event("step"))
        called.on_event(event("step", step=4))
        called.on_event(event("message", text="no callback is told"))
        called.end_run(0, None)
    assert [one.step for one in history.told] == [3, 4, 4]
    assert [one.step for one in fails.told] == [3]
    assert called.failure.startswith("callback Fails.on_step failed: ValueError: no\n")


def test_one_that_changes_what_the_ranks_have_copies_of_stops_the_run(tmp_path: Path) -> None:
    rates = {"rate": 1.0}

    class Lowers(wanma.Callback):
        def on_step(self, event: wanma.StepEnd) -> None:
            rates["rate"] /= event.step

    sent = {"data": [1.0], "schedule": lambda _: rates["rate"]}
    with CallbackThread([Lowers()], RunDirectory(tmp_path), sent) as called:
        called.on_event(event("step"))
        called.end_run(0, None)
    assert called.failure.startswith("a callback has changed schedule by on_step of step 3")


def test_a_wish_to_stop_is_told_once(tmp_path: Path) -> None:
    called = CallbackThread([StopsAfter(3)], RunDirectory(tmp_path))
    with called:
        assert called.on_event(event("step")) is None
        called.close()
    assert called.on_event(event("message")) == "callback StopsAfter.on_step: that will do"
    assert called.on_event(event("message")) is None


def test_what_is_no_callback_is_refused() -> None:
    path = f"{__name__}:StopsNever"
    for check, given, fact in (
        (check_callbacks, [Broken], "the class Broken"),
        (check_callbacks, lambda: None, "an object of function"),
        (load_callbacks, [path], f"'{path}': .*on_stepp .*'on_step'"),
    ):
        with pytest.raises(JobError, match=fact):
            check(given)
    assert isinstance(load_callbacks([f"{__name__}:Broken"])[0], Broken)
