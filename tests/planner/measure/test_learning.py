"""Learning from a run: its next forecast is nearer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from benchmarks.planner.step_times import decoder_step_time
from hypothesis import given, settings
from hypothesis import strategies as st

from support.machines import machine
from wanma.job.forecast.forecast import Forecast, LayerWorkload, StepTime, Workload
from wanma.job.plan.plan import Plan
from wanma.models.config.dimensions import DecoderConfig
from wanma.planner.calibration.correction_update import (
    MIN_UPDATE_WEIGHT,
    CorrectionChange,
    ObservedStep,
    update_corrections,
)
from wanma.planner.cost.decoder_layers import FrameworkTraits
from wanma.planner.hardware_model.calibration import FACTOR_BOUNDS, CorrectionFactors
from wanma.planner.memory.peak import forecast_memory

MODEL = DecoderConfig(8, 1024, 16, 16, 2816, 32000)
PLAN = Plan(dp_replicate=2, precision="bf16")
MIB = 1 << 20
NONE = CorrectionFactors()


def forecast(step: StepTime | None) -> Forecast:
    return Forecast(
        100 * MIB,
        100 * MIB,
        200 * MIB,
        80 * MIB,
        20 * MIB,
        runtime_bytes=200 * MIB,
        fragmentation_bytes=100 * MIB,
        step=step,
    )


def linear(step: StepTime, made_with: CorrectionFactors = NONE) -> Callable[[CorrectionFactors], Forecast]:
    """`step`, forecast with `made_with`; with others each kind takes their share more or less."""

    def corrected(now: CorrectionFactors) -> Forecast:
        compute, communication, optimizer, unused = (
            getattr(now, kind) / getattr(made_with, kind)
            for kind in ("compute", "communication", "optimizer", "unused")
        )
        kinds = {
            "compute": step.compute * compute,
            "tensor": step.tensor * communication,
            "data": step.data * communication,
            "optimizer": step.optimizer * optimizer,
        }
        plain = forecast(replace(step, **kinds, seconds=sum(kinds.values())))
        return replace(plain, fragmentation_bytes=int(plain.fragmentation_bytes * unused))

    return corrected


def observed(step: StepTime, memory: int | None = None, **factors: float) -> ObservedStep:
    """A run whose phases took `factors` times what `step` says."""
    phases = {
        "forward_backward": (step.compute + step.tensor + step.bubble) * factors.get("compute", 1.0),
        "communication": step.data * factors.get("communication", 1.0),
        "optimizer": step.optimizer * factors.get("optimizer", 1.0),
    }
    return ObservedStep(sum(phases.values()), phases, memory)


STEP = StepTime(1.0, 0.7, data=0.2, optimizer=0.1)


def by_kind(lessons: tuple[CorrectionChange, ...]) -> dict[str, CorrectionChange]:
    return {lesson.kind: lesson for lesson in lessons}


def test_the_first_run_is_believed() -> None:
    seen = observed(STEP, compute=1.2, communication=0.5, optimizer=2.0)
    found, lessons = update_corrections(NONE, PLAN, linear(STEP), seen)
    assert found.compute == pytest.approx(1.2)
    assert found.communication == pytest.approx(0.5)
    assert found.optimizer == pytest.approx(2.0)
    assert found.runs == 1
    taught = by_kind(lessons)["compute"]
    assert (taught.before, taught.after, taught.forecast) == (1.0, found.compute, 0.7)
    assert taught.measured == pytest.approx(0.84)


def test_later_runs_count_as_much_as_those_before_them() -> None:
    before = CorrectionFactors(compute=1.2, runs=1)
    # Forecast with 1.2, and as long again: what it takes is 1.44 times the plain forecast.
    found, _ = update_corrections(before, PLAN, linear(STEP, before), observed(STEP, compute=1.2))
    assert found.compute == pytest.approx((1.2 * 1.44) ** 0.5)


def test_after_many_runs_the_newest_still_counts() -> None:
    found, _ = update_corrections(
        CorrectionFactors(runs=1000), PLAN, linear(STEP), observed(STEP, compute=2.0)
    )
    assert found.compute == pytest.approx(2.0**MIN_UPDATE_WEIGHT)


def test_corrections_stay_within_their_bounds() -> None:
    found, _ = update_corrections(NONE, PLAN, linear(STEP), observed(STEP, compute=100.0, optimizer=0.001))
    assert (found.compute, found.optimizer) == (FACTOR_BOUNDS[1], FACTOR_BOUNDS[0])


def test_what_is_too_short_to_tell_teaches_nothing() -> None:
    short = replace(STEP, data=0.001, optimizer=0.001)
    found, lessons = update_corrections(NONE, PLAN, linear(short), observed(short, communication=3.0))
    assert set(by_kind(lessons)) == {"compute"}
    assert found.communication == 1.0


def test_what_waits_for_copies_teaches_nothing_of_computing_or_of_the_update() -> None:
    step = StepTime(1.0, 0.6, data=0.1, moving=0.2, optimizer=0.1)
    observed = ObservedStep(2.0, {"forward_backward": 1.6, "communication": 0.2, "optimizer": 0.2})
    for key, kinds in (
        ("offload_activations", {"communication", "optimizer"}),
        ("offload_optimizer", {"compute", "communication"}),
        ("offload_parameters", {"communication"}),
    ):
        away = replace(PLAN, **{key: "disk"})
        _, lessons = update_corrections(NONE, away, lambda _: forecast(step), observed)
        assert {lesson.kind for lesson in lessons} - {"unused"} == kinds


def test_tensor_parallelism_teaches_communication_with_computing() -> None:
    step = StepTime(1.0, 0.5, tensor=0.4, optimizer=0.1)
    found, _ = update_corrections(NONE, Plan(tp=2), linear(step), observed(step, compute=1.5))
    assert found.compute == pytest.approx(1.5)
    assert found.communication == pytest.approx(1.5)


def test_memory_teaches_what_the_allocator_holds() -> None:
    # 700 MiB are counted, 100 MiB are the allocator's; 50 MiB more were held.
    found, lessons = update_corrections(NONE, PLAN, linear(STEP), observed(STEP, memory=850 * MIB))
    assert found.unused == pytest.approx(1.5)
    assert by_kind(lessons)["unused"].measured == 150 * MIB


def test_a_gpus_recorder_says_nothing_of_its_allocator() -> None:
    found, _ = update_corrections(
        NONE, replace(PLAN, device="cuda"), linear(STEP), observed(STEP, memory=850 * MIB)
    )
    assert found.unused == 1.0


def test_a_forecast_without_time_is_refused() -> None:
    with pytest.raises(ValueError, match="without a step's time"):
        update_corrections(NONE, PLAN, lambda _: forecast(None), observed(STEP))


@settings(max_examples=30, deadline=None)
@given(st.floats(0.8, 2.0), st.floats(0.8, 2.0), st.floats(0.8, 2.0))
def test_the_same_run_is_forecast_nearer_afterwards(
    compute: float, communication: float, optimizer: float
) -> None:
    """Real forecasts of a machine whose rates are off: after one run each kind is right."""

    def step(corrections: CorrectionFactors) -> StepTime:
        return decoder_step_time(MODEL, 512, PLAN, 8, corrections.apply(machine(2)))

    before = step(NONE)
    seen = observed(before, compute=compute, communication=communication, optimizer=optimizer)
    found, _ = update_corrections(NONE, PLAN, lambda now: forecast(step(now)), seen)
    after = step(found)
    assert after.compute == pytest.approx(seen.phases["forward_backward"], rel=1e-6)
    assert after.optimizer == pytest.approx(seen.phases["optimizer"], rel=1e-6)
    assert abs(after.seconds - seen.seconds) <= max(
        0.2 * abs(before.seconds - seen.seconds), 1e-3 * after.seconds
    )


def test_what_was_learned_of_the_allocator_is_forecast() -> None:
    workload = Workload((LayerWorkload("block", 4, 1_000_000, 2e9, 5e6, is_block=True),), 128)
    usual, twice = (
        forecast_memory(workload, Plan(), "adamw", framework=FrameworkTraits(fragmentation_factor=factor))
        for factor in (1.0, 2.0)
    )
    assert usual.fragmentation_bytes > 0
    assert twice.fragmentation_bytes == pytest.approx(2 * usual.fragmentation_bytes, abs=1)
    assert twice.memory_bytes - usual.memory_bytes == pytest.approx(usual.fragmentation_bytes, abs=1)
    assert NONE.apply(machine(2)).unused_factor == 1.0
    assert CorrectionFactors(unused=2.0).apply(machine(2)).unused_factor == 2.0
