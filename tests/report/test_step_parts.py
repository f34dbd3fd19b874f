"""Parts of a step add up to it, whatever a run could measure."""

from __future__ import annotations

import pytest

from wanma.job.forecast.forecast import StepTime
from wanma.report.step_parts import forecast_parts, step_parts

PHASES = {
    "data": 0.05,
    "forward_backward": 0.7,
    "communication": 0.1,
    "optimizer": 0.06,
    "checkpoint": 0.02,
    "host": 0.03,
    "validation": 9.0,
}


def test_waits_inside_forward_and_backward_are_parts_by_axis() -> None:
    exposed = {"exposed.tensor": 0.04, "exposed.context": 0.03, "exposed.expert": 0.02, "exposed.data": 0.1}
    parts = step_parts(1.0, PHASES | exposed | {"compute": 0.6})
    assert parts == pytest.approx(
        {
            "compute": 0.6,
            "tensor": 0.04,
            "context": 0.03,
            "expert": 0.02,
            "data": 0.1,
            "optimizer": 0.06,
            "loading": 0.05,
            "checkpoint": 0.02,
            "host": 0.03,
            "other": 0.05,
        }
    )
    assert sum(parts.values()) == pytest.approx(1.0)


def test_a_wait_in_a_pipeline_is_bubble_and_transfers() -> None:
    times = {"compute": 0.5, "exposed.pipeline": 0.3, "bubble": 0.2}
    assert step_parts(1.0, times) == pytest.approx(
        {"compute": 0.5, "bubble": 0.2, "pipeline": 0.1, "other": 0.2}
    )
    # A replay cannot explain more than was waited.
    assert step_parts(1.0, times | {"bubble": 0.4})["bubble"] == pytest.approx(0.3)


def test_a_gpus_forward_and_backward_are_one_part_less_what_it_idled() -> None:
    assert step_parts(1.0, PHASES)["forward_backward"] == pytest.approx(0.7)
    parts = step_parts(1.0, PHASES | {"gpu_idle": 0.3})
    # 0.3 s without a kernel, of which the wait for data, the checkpoint and the loop explain 0.1 s.
    assert parts["host"] == pytest.approx(0.03 + 0.2)
    assert parts["forward_backward"] == pytest.approx(0.5)
    assert sum(parts.values()) == pytest.approx(1.0)
    assert step_parts(1.0, PHASES | {"gpu_idle": 0.04})["host"] == pytest.approx(0.03)


def test_idle_is_part_of_a_gpus_compute_where_that_is_known() -> None:
    parts = step_parts(1.0, PHASES | {"compute": 0.6, "exposed.tensor": 0.1, "gpu_idle": 0.3})
    assert parts["compute"] == pytest.approx(0.6 - 0.2)
    assert parts["host"] == pytest.approx(0.03 + 0.2)
    assert "forward_backward" not in parts
    assert sum(parts.values()) == pytest.approx(1.0)


def test_what_is_not_explained_may_be_negative_and_is_shown() -> None:
    assert step_parts(0.5, {"compute": 0.6}) == pytest.approx({"compute": 0.6, "other": -0.1})


def test_names_of_a_program_are_parts_of_their_own() -> None:
    assert step_parts(1.0, {"tokenizing": 0.2}) == pytest.approx({"tokenizing": 0.2, "other": 0.8})


def test_a_forecast_has_the_same_parts() -> None:
    step = StepTime(
        1.0, 0.5, tensor=0.1, data=0.05, moving=0.05, bubble=0.1, optimizer=0.1, loading=0.06, checkpoint=0.04
    )
    apart = forecast_parts(step, separates_compute=True)
    assert apart["compute"] == pytest.approx(0.55)
    assert sum(apart.values()) == pytest.approx(1.0)
    together = forecast_parts(step, separates_compute=False)
    assert together["forward_backward"] == pytest.approx(0.8)
    assert sum(together.values()) == pytest.approx(1.0)
