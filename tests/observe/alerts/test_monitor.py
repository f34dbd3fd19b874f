"""Alerts of a run, from its events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from wanma.observe.alerts.monitor import AlertMonitor

START = {"kind": "start", "time": 0.0, "step": 0, "steps": 10_000, "world_size": 2, "plan": "two ranks"}
PLAN = {"forecast": {"step": {"compute": 0.9, "data": 0.1, "seconds": 1.0, "uncertainty": 0.2}}}
GIB = 1 << 30


def step(number: int, time: float, **values: Any) -> dict[str, Any]:
    record = {"loss": 2.0, "grad_norm": 1.0, "step_seconds": 1.0, "phases": {"forward_backward": 1.0}}
    return {"kind": "step", "step": number, "time": time, **record, **values}


def usage(time: float, *, silent: float = 0.0, alive: bool = True, **node: Any) -> dict[str, Any]:
    ranks = [{"rank": rank, "is_alive": alive, "silent_seconds": silent, "step": 1} for rank in range(2)]
    values = {
        "memory_bytes": 16 * GIB,
        "memory_available_bytes": 8 * GIB,
        "disk_bytes": 100 * GIB,
        "disk_free_bytes": 50 * GIB,
    }
    return {"kind": "usage", "time": time, "node": 0, "ranks": ranks, **values, **node}


def hour(monitor: AlertMonitor, seconds: int = 3600, **values: Any) -> Iterator[dict[str, Any]]:
    """Yield the alerts of a run with a step a second, a reading every five and a checkpoint every hundred."""
    monitor.on_event(START)
    for second in range(1, seconds):
        yield from monitor.on_event(step(second, float(second), **values))
        if second % 5 == 0:
            yield from monitor.on_event(usage(float(second)))
        if second % 100 == 0:
            monitor.on_event({"kind": "checkpoint", "time": float(second), "step": second, "bytes": 1})


def names(alerts: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    return [(alert["alert"], alert["is_firing"]) for alert in alerts]


def test_a_healthy_hour_has_no_alert() -> None:
    assert list(hour(AlertMonitor(PLAN, 100))) == []


@pytest.mark.parametrize(
    ("values", "alert"),
    [
        ({"phases": {"forward_backward": 0.7, "data": 0.3}}, "DataWait"),
        ({"step_seconds": 2.0}, "SlowerThanForecast"),
        ({"loss": None, "non_finite": {"loss": "nan"}}, "LossNotFinite"),
        ({"grad_norm": None, "non_finite": {"grad_norm": "inf"}}, "LossNotFinite"),
    ],
)
def test_a_fault_of_each_step_fires_its_alert_alone(values: dict[str, Any], alert: str) -> None:
    assert names(list(hour(AlertMonitor(PLAN), 1200, **values))) == [(alert, True)]


def test_a_gradient_that_overflows_is_a_part_of_fp16() -> None:
    monitor = AlertMonitor(PLAN)
    list(hour(monitor, 2))
    monitor.on_event({**START, "time": 2.0, "step": 1, "plan": "2 ranks (one process), fp16, cuda"})
    monitor.on_event(step(2, 3.0, grad_norm=None, non_finite={"grad_norm": "inf"}))
    assert monitor.on_event(usage(5.0)) + monitor.on_event(usage(10.0)) == []


def test_an_alert_fires_once_and_resolves_when_its_cause_is_gone() -> None:
    monitor = AlertMonitor(PLAN)
    list(hour(monitor, 60))
    alerts = []
    for second in range(60, 400, 5):
        alerts += monitor.on_event(usage(float(second), silent=second - 60.0))
    assert names(alerts) == [("TrainingStalled", True)]
    assert "125 s" in alerts[0]["text"]
    assert names(monitor.on_event(usage(405.0))) == [("TrainingStalled", False)]


def test_silence_that_is_short_for_such_long_steps_is_no_stall() -> None:
    monitor = AlertMonitor(PLAN)
    list(hour(monitor, 60, step_seconds=100.0))
    assert monitor.on_event(usage(300.0, silent=240.0)) == []


@pytest.mark.parametrize("wavering", [0.0, 40.0])
def test_a_spike_of_the_loss_stands_out_of_its_noise_though_it_wavers(wavering: float) -> None:
    monitor = AlertMonitor(PLAN)
    monitor.on_event(START)
    alerts = []
    for second in range(1, 1200):
        loss = 2.0 + 0.1 * (second % 3) + (20.0 + wavering * (second % 2) if second > 900 else 0.0)
        monitor.on_event(step(second, float(second), loss=loss))
        if second % 5 == 0:
            alerts += monitor.on_event(usage(float(second)))
    assert names(alerts)[0] == ("LossSpike", True)


def test_series_of_a_rank_end_with_it() -> None:
    monitor = AlertMonitor(PLAN)
    monitor.on_event(usage(1.0))
    monitor.on_event(usage(2.0, ranks=[{"rank": 1, "is_alive": True}], gpus=[{"gpu": 0}]))
    ranks = {sample.labels for sample in monitor.samples() if sample.metric == "rank_up"}
    assert ranks == {(("node", "0"), ("rank", "1"))}


def test_resources_of_a_node_are_named_with_the_node() -> None:
    monitor = AlertMonitor(PLAN)
    list(hour(monitor, 30))
    monitor.on_event({"kind": "checkpoint", "time": 30.0, "step": 29, "bytes": 40 * GIB})
    readings = [
        usage(time, disk_free_bytes=3 * GIB, memory_available_bytes=GIB // 2) for time in (35.0, 100.0)
    ]
    alerts = [alert for reading in readings for alert in monitor.on_event(reading)]
    assert {alert["alert"] for alert in alerts} == {"NodeMemoryLow", "DiskFull", "NoRoomForCheckpoint"}
    assert all(alert["labels"] == {"node": "0"} for alert in alerts)


def test_gpus_and_ranks_are_named() -> None:
    monitor = AlertMonitor(PLAN)
    list(hour(monitor, 30))
    gpus = [
        {"gpu": 0, "is_throttled": False, "utilization": 0.9},
        {"gpu": 1, "is_throttled": True},
        {"gpu": 2, "is_throttled": True, "is_used": False},
    ]
    alerts = []
    for second in range(30, 400, 5):
        alerts += monitor.on_event(usage(float(second), gpus=gpus))
    monitor.on_event({"kind": "straggler", "time": 400.0, "rank": 1, "is_slow": True})
    alerts += monitor.on_event(usage(400.0, gpus=gpus))
    assert [(alert["alert"], alert["labels"]) for alert in alerts] == [
        ("GpuThrottled", {"gpu": "1", "node": "0"}),
        ("Straggler", {"rank": "1"}),
    ]
    series = sorted(sample.labels for sample in monitor.samples() if sample.metric == "alert")
    assert series == [
        (("alert", "GpuThrottled"), ("gpu", "1"), ("node", "0"), ("rank", ""), ("severity", "warning")),
        (("alert", "Straggler"), ("gpu", ""), ("node", ""), ("rank", "1"), ("severity", "warning")),
    ]


@pytest.mark.parametrize(
    ("needed", "retries_per_minute", "expected"),
    [(40 * GIB, 0, []), (40 * GIB, 1, ["GpuMemoryRetries"]), (78 * GIB, 0, ["GpuMemoryLow"])],
)
def test_a_gpu_that_is_full_of_cached_memory_is_healthy(
    needed: int, retries_per_minute: int, expected: list[str]
) -> None:
    monitor, alerts = AlertMonitor(PLAN), []
    monitor.on_event(START)
    for second in range(0, 900, 5):
        rank = {"rank": 0, "is_alive": True, "allocation_retries": 2 + second // 60 * retries_per_minute}
        memory = {"memory_bytes": 79 * GIB, "total_memory_bytes": 80 * GIB, "needed_memory_bytes": needed}
        alerts += monitor.on_event(usage(float(second), gpus=[{"gpu": 0, **memory}], ranks=[rank]))
    assert names(alerts) == [(name, True) for name in expected]


def test_a_gpu_is_idle_only_while_ranks_do_steps() -> None:
    for steps_per_second, expected in ((1, [("GpuIdle", True)]), (0, [])):
        monitor, alerts = AlertMonitor(PLAN), []
        monitor.on_event(START)
        for second in range(0, 900, 5):
            ranks = [{"rank": 0, "is_alive": True, "silent_seconds": 0.0, "steps": steps_per_second * second}]
            gpus = [{"gpu": 0, "utilization": 0.01}]
            alerts += monitor.on_event(usage(float(second), gpus=gpus, ranks=ranks))
        assert names(alerts) == expected


def test_one_rank_that_reports_progress_is_enough() -> None:
    monitor = AlertMonitor(PLAN)
    list(hour(monitor, 60))
    ranks = [{"rank": rank, "is_alive": True, "silent_seconds": 300.0 * rank} for rank in range(2)]
    assert monitor.on_event(usage(400.0, ranks=ranks)) == []


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_too_old_a_checkpoint(has_checkpoint: bool) -> None:
    monitor = AlertMonitor(PLAN, 100)
    monitor.on_event(START)
    if has_checkpoint:
        monitor.on_event({"kind": "checkpoint", "time": 5.0, "step": 5, "bytes": 1})
    alerts = []
    for second in range(6, 1000):
        alerts += monitor.on_event(step(second, float(second)))
        alerts += monitor.on_event(usage(float(second)))
    assert names(alerts) == [("CheckpointTooOld", True)]


def test_the_end_resolves_and_a_failure_is_the_last_alert() -> None:
    for failure, expected in ((None, [("DataWait", False)]), ("rank 1 died", [("RunFailed", True)])):
        monitor = AlertMonitor(PLAN)
        list(hour(monitor, 1200, phases={"data": 0.5}))
        assert names(monitor.end(1200.0, failure)) == expected
