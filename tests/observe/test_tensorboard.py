"""The TensorBoard sink writes what TensorBoard reads back, and says how to get it when it is absent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from wanma.job.errors import WanmaError
from wanma.job.run.run_directory import RunDirectory
from wanma.observe.sinks.tensorboard import TensorBoardSink, to_scalars

Record = Callable[..., dict[str, Any]]


def write(run: RunDirectory, record: Record, steps: range, loss: float) -> None:
    sink = TensorBoardSink()
    sink.open(run, steps.start)
    for step in steps:
        sink.write({"kind": "step", "time": 1e9 + step, **record(step, loss=loss)})
    sink.write({"kind": "validation", "time": 1e9, "step": steps.stop - 1, "loss": 2.0, "perplexity": 7.4})
    sink.write({"kind": "message", "time": 1e9, "level": "info", "text": "not drawn"})
    sink.close()


def read_back(run: RunDirectory) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run.tensorboard))
    accumulator.Reload()
    return accumulator


def test_scalars_are_read_back(run: RunDirectory, step_record: Record) -> None:
    write(run, step_record, range(1, 4), loss=3.5)
    scalars = read_back(run)
    assert [(event.step, event.value) for event in scalars.Scalars("train/loss")] == [
        (1, 3.5),
        (2, 3.5),
        (3, 3.5),
    ]
    assert scalars.Scalars("validation/perplexity")[0].value == pytest.approx(7.4)
    assert "speed/mfu" not in scalars.Tags()["scalars"]  # unknown in these records


def test_a_resumed_run_overrules_the_steps_it_repeats(
    run: RunDirectory, step_record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wanma.observe.sinks.tensorboard as module

    monkeypatch.setattr(module.time, "time", lambda: 1000.0)
    write(run, step_record, range(1, 6), loss=1.0)
    monkeypatch.setattr(module.time, "time", lambda: 2000.0)
    write(run, step_record, range(4, 7), loss=2.0)
    losses = [(event.step, event.value) for event in read_back(run).Scalars("train/loss")]
    assert losses == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0)]


def test_only_numbers_of_steps_and_validations_are_drawn() -> None:
    assert to_scalars({"kind": "checkpoint", "step": 3, "bytes": 10}) == {}
    assert to_scalars({"kind": "validation", "step": 3, "time": 1.0, "accuracy": 0.5}) == {
        "validation/accuracy": 0.5
    }


def test_without_the_package_the_start_fails_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    with pytest.raises(WanmaError) as caught:
        TensorBoardSink()
    assert caught.value.hint == "pip install 'wanma[tensorboard]'"


def test_writing_needs_no_torch() -> None:
    code = (
        "import sys; from wanma.observe.sinks.tensorboard import TensorBoardSink; TensorBoardSink();"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
