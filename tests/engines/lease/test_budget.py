"""Budgets of a run: what its starts have used, and idle devices."""

from __future__ import annotations

from typing import Any

import pytest

from wanma.engines.lease.budget import BudgetWatch
from wanma.job.cluster import Cluster, Device, NodeGroup
from wanma.job.errors import JobError, WanmaError
from wanma.job.sections.cluster import BudgetSection

CPU = Device("cpu", "processor", 1 << 34, {}, power_watts=200.0)
NODE = NodeGroup("n", 4, 1 << 34, (), count=2, cpu=CPU, power_watts=400.0, price_per_hour=3.0)


def start(time: float, step: int = 0, **values: Any) -> dict[str, Any]:
    return {"kind": "start", "time": time, "step": step, "world_size": 4, "nodes": 2, **values}


def step(time: float, seconds: float = 60.0) -> dict[str, Any]:
    return {"kind": "step", "time": time, "step_seconds": seconds}


def watch(*records: dict[str, Any], node: NodeGroup = NODE, **limits: float) -> BudgetWatch:
    return BudgetWatch(BudgetSection(**limits), Cluster((node,)), records)


@pytest.mark.parametrize(
    ("limits", "end"),
    [
        ({"hours": 1.0}, 3600.0),
        ({"device_hours": 2.0}, 1800.0),  # of four devices
        ({"money": 3.0}, 1800.0),  # two nodes at 3 an hour
        ({"hours": 1.0, "money": 3.0}, 1800.0),
        ({"kwh": 0.3}, 1800.0),  # 300 W a node: a CPU of 200, and half of the rest
    ],
    ids=str,
)
def test_the_run_is_asked_to_end_before_a_limit(limits: dict[str, float], end: float) -> None:
    budget = watch(**limits)
    budget.on_event(start(0.0))
    asked = [now for now in range(60, 7200, 60) if budget.on_event(step(float(now)))]
    assert asked == [end - 120.0], "two steps before, and once"


def test_pauses_between_starts_cost_nothing_but_recoveries_do() -> None:
    earlier = [
        start(0.0),
        step(1000.0),
        {"kind": "finish", "time": 1000.0, "outcome": "interrupted"},
        start(50_000.0, step=5),
        step(50_500.0),  # killed
        start(90_000.0, step=5),
        start(90_400.0, step=5, is_restart=True),
        step(90_500.0),
    ]
    with pytest.raises(WanmaError, match=r"cluster\.budget\.hours = 0\.5 is used up: 0\.5556"):
        watch(*earlier, hours=0.5)
    assert watch(*earlier, hours=0.6).on_event(start(200_000.0, step=5)) is None
    assert watch(*earlier, start(300_000.0), hours=0.5), "another training in the folder"


@pytest.mark.parametrize("key", ["money", "kwh"])
def test_a_limit_without_a_rate_is_refused(key: str) -> None:
    node = NodeGroup("n", 4, 1 << 34, (), cpu=Device("cpu", "processor", 1 << 34, {}))
    with pytest.raises(JobError, match=rf"cluster\.budget\.{key}"):
        watch(node=node, **{key: 1.0})


def usage(time: float, share: float | None = None, cpu_seconds: float = 0.0, node: int = 0) -> dict[str, Any]:
    gpus = [
        {"gpu": 0, "utilization": share, "is_used": True},
        {"gpu": 1, "utilization": 1.0, "is_used": False},
    ]
    ranks = [{"rank": 0, "cpu_seconds": cpu_seconds}]
    return {"kind": "usage", "node": node, "time": time, "gpus": gpus, "ranks": ranks}


def test_idle_gpus_are_given_back() -> None:
    budget = watch(idle_minutes=1.0)
    readings = [(0, 0.9), (30, 0.01), (60, 0.02), (80, 0.9), (100, 0.0), (170, 0.0), (240, 0.0)]
    asked = []
    for now, share in readings:
        assert budget.on_event(usage(now, 0.0, node=1)) is None, "another node"
        if budget.on_event(usage(now, share)):
            asked.append(now)
    assert asked == [170], "once"


def test_time_passes_without_steps() -> None:
    budget = watch(hours=1.0)
    budget.on_event(start(1000.0))
    budget.on_event(step(1700.0))
    asked = [now for now in range(1600, 6000, 100) if budget.on_event(usage(float(now)))]
    assert asked == [4500], "two steps before its end; a reading that comes late counts nothing twice"


def test_without_gpus_the_processors_count() -> None:
    budget = watch(idle_minutes=1.0)
    for now, cpu_seconds in ((0, 0.0), (50, 40.0), (100, 40.5), (130, 41.0)):
        assert budget.on_event(usage(now, None, cpu_seconds)) is None
    assert "idle_minutes" in (budget.on_event(usage(170, None, 41.0)) or "")
