"""Present values of metrics, from the records of a run."""

from __future__ import annotations

import math
import re
from dataclasses import asdict

import pytest

from support.observe_pages import UNITS
from wanma.job.forecast.forecast import StepTime
from wanma.job.plan.plan import Plan
from wanma.observe.series.catalogue import CATALOGUE, RANK_LABELS
from wanma.observe.series.run_series import NodeSeries, RunSeries, Sample

SCALED_UNIT = re.compile(
    r"(milli|micro|nano|kilo|mega|giga)|_(ms|us|ns|minutes|hours|[kmgt]i?b|[kmg]?hz|mw|kw|percent)(_|$)"
)
START = {"kind": "start", "time": 100.0, "step": 0, "steps": 50, "world_size": 4, "plan": "dp 4"}


def step(number: int, **values: object) -> dict[str, object]:
    record = {"step": number, "time": 100.0 + number, "step_seconds": 0.5, "loss": 2.0, "grad_norm": 1.0}
    return {"kind": "step", **record, **values}


def test_a_step_sets_gauges_and_adds_to_counters() -> None:
    series = RunSeries()
    series.update(START)
    for number in (1, 2, 3):  # the first one of a start counts for no mean
        series.update(
            step(
                number,
                phases={"data": 0.1},
                load_seconds={"read": 0.3, "decode": 0.5},
                mfu=0.4,
                tokens_per_second=100.0,
                exposed_communication_seconds={"data": 0.2},
            )
        )
    assert series.get("completed_steps") == 3
    assert series.get("steps") == 2
    assert series.get("mfu_ratio") == 0.4
    assert series.get("phase_seconds", phase="data") == 0.2
    assert series.get("load_seconds", part="decode") == 1.0
    assert series.get("bad_samples") == 0
    assert series.get("exposed_communication_seconds", kind="data") == 0.4
    assert series.get("step_time_seconds") == 1.0
    assert series.get("targets") == 100.0
    assert series.get("run_info", state="running", plan="dp 4") == 1


def test_throughput_mfu_and_goodput_have_their_forecasts() -> None:
    forecast = {
        "step": {"seconds": 0.25, "uncertainty": 0.1},
        "model_flops_utilisation": 0.4,
        "run": {"useful": {"share": 0.9}},
    }
    series = RunSeries({"forecast": forecast})
    series.update(START)
    series.update(step(1, tokens_per_second=100.0))
    assert series.get("forecast_targets_per_second") == 200.0  # 50 targets in half a second
    assert series.get("forecast_mfu_ratio") == 0.4
    assert series.get("forecast_goodput_ratio") == 0.9


def test_forecasts_have_the_phases_and_kinds_of_what_is_measured() -> None:
    step = StepTime(1.0, 0.6, tensor=0.1, bubble=0.2, optimizer=0.05, loading=0.04, checkpoint=0.01)
    ranks = [{"memory_bytes": 8, "tensor_bytes": 6}, {"memory_bytes": 9, "tensor_bytes": 7}]
    forecast = {
        "step": asdict(step),
        "memory_bytes": 9,
        "tensor_bytes": 7,
        "pipeline_ranks": ranks,
        "checkpoint": {"size_bytes": 5, "stall_seconds": 0.5, "write_seconds": 4.0},
        "run": {
            "seconds": 100.0,
            "energy_joules": 5e4,
            "useful": {"share": 0.9, "seconds_per_failure": 60.0},
        },
    }
    series = RunSeries({"plan": Plan(tp=2, pp=2, device="cuda").to_json(), "forecast": forecast})
    phases = {"forward_backward": 0.9, "optimizer": 0.05, "data": 0.04, "checkpoint": 0.01}
    for phase, seconds in phases.items():
        assert series.get("forecast_phase_seconds", phase=phase) == pytest.approx(seconds)
    kinds = ("tensor", "pipeline", "data")
    exposed = [series.get("forecast_exposed_communication_seconds", kind=kind) for kind in kinds]
    assert exposed == [0.1, 0.2, None], "the plan has no data-parallel ranks"
    expected = {
        "bubble_seconds": 0.2,
        "memory_bytes": 6,
        "gpu_memory_used_bytes": 9,
        "checkpoint_bytes": 5,
        "checkpoint_stall_seconds": 0.5,
        "checkpoint_write_seconds": 4.0,
        "recovery_seconds": 60.0,
        "run_seconds": 100.0,
        "power_watts": 500.0,
    }
    assert {name: series.get(f"forecast_{name}") for name in expected} == expected
    series.update({**START, "time": 100.0})
    series.update({"kind": "planned", "time": 101.0, "plan": Plan().to_json(), "forecast": None})
    assert not [sample for sample in series.samples() if sample.metric.startswith("forecast_")]


def test_a_number_that_is_not_finite_is_shown_and_counted() -> None:
    series = RunSeries()
    series.update(step(1, loss=None, non_finite={"loss": "nan"}))
    assert math.isnan(series.get("loss") or 0.0)
    assert series.get("non_finite_steps") == 1


def test_goodput_leaves_out_repeated_steps_and_waits() -> None:
    series = RunSeries()
    series.update(START)
    for number in range(1, 5):
        series.update(step(number))
    series.update({"kind": "checkpoint", "time": 104.0, "step": 2, "bytes": 7, "stall_seconds": 0.1})
    series.update({**START, "time": 110.0, "step": 2})
    assert series.get("repeated_steps") == 2
    assert series.get("goodput_ratio") == 1.0 / 10.0  # steps 1 and 2 of half a second, in ten seconds
    assert series.get("used_device_seconds") == 4.0
    assert series.get("starts") == 2


def test_a_run_stays_down_after_its_end_until_it_starts_again() -> None:
    series = RunSeries()
    series.mark_alive(True)
    assert {sample.metric for sample in series.samples()} == {"up"}, "no start was seen"
    series.update(START)
    series.update({"kind": "finish", "time": 101.0, "outcome": "finished"})
    series.mark_alive(True)
    assert series.get("up") == 0
    series.update({**START, "step": 3})
    assert series.get("up") == 1


def test_totals_go_on_from_the_records_of_earlier_starts() -> None:
    series = RunSeries(checkpoint_interval_steps=2)
    checkpoint = {"kind": "checkpoint", "time": 104.0, "step": 2, "bytes": 7}
    series.replay([START, *(step(number) for number in range(1, 5)), checkpoint])
    assert list(series.samples()) == [Sample("up", (), 0.0)]
    series.update({**START, "time": 110.0, "step": 2})
    expected = {"starts": 2, "repeated_steps": 2, "steps": 0, "checkpoint_step": 2, "goodput_ratio": 0.1}
    assert {name: series.get(name) for name in expected} == expected
    assert series.get("checkpoint_timestamp_seconds") == 104.0


def test_a_fresh_training_in_the_same_folder_has_totals_of_its_own() -> None:
    series = RunSeries({"forecast": {"memory_bytes": 7}})
    series.replay([START, step(1), {"kind": "recovery", "time": 102.0, "seconds": 1.0}])
    series.update({**START, "time": 200.0})
    memory = {"forecast_memory_bytes": 7, "forecast_rank_memory_bytes": 7}
    expected = {"starts": 1, "recoveries": 0, "checkpoint_step": 0, **memory}
    assert {name: series.get(name) for name in expected} == expected


def test_validations_have_a_slope_and_a_best() -> None:
    series = RunSeries()
    for at, loss in ((10, 3.0), (20, 2.0), (30, 2.5)):
        event = {"kind": "validation", "time": 1.0, "step": at, "loss": loss, "metrics": {"bleu": 0.3}}
        series.update(event)
    assert series.get("best_validation_loss") == 2.0
    assert series.get("validation_loss_slope") == 0.05
    assert series.get("validation_metric", metric="bleu") == 0.3


def test_every_metric_has_base_units() -> None:
    for metric in CATALOGUE.values():
        assert not UNITS & set(metric.name.split("_")[:-1]), "a unit is the end of the name"
        assert not SCALED_UNIT.search(metric.name), metric


def test_series_are_as_many_as_ranks_and_nodes_at_any_size() -> None:
    run = RunSeries()
    run.update({**START, "world_size": 4096})
    run.update(step(1, phases={"data": 0.1, "forward_backward": 0.3}))
    for_run = len(list(run.samples()))
    assert for_run < 60, "of the whole run, and none by rank"
    for rank in range(4096):
        run.update({"kind": "straggler", "time": 102.0, "rank": rank, "is_slow": rank == 7})
    assert len(list(run.samples())) == for_run + 4096

    def count(ranks: int) -> int:
        keys = [metric.key for metric in CATALOGUE.values() if metric.labels == RANK_LABELS]
        rows = [{"rank": rank, **dict.fromkeys(keys, 1)} for rank in range(ranks)]
        return len(list(NodeSeries({"node": 511, "ranks": rows}).samples()))

    assert 0 < count(8) == 8 * count(1) <= 8 * 10
