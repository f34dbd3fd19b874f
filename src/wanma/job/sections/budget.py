"""Section `[cluster.budget]` of a job file: what a run may use."""

from __future__ import annotations

from pydantic import Field

from wanma.job.sections.base import Section


class BudgetSection(Section):
    """Limits over all starts of a run, which ends in order, with a checkpoint, before it passes one."""

    hours: float | None = Field(
        None, gt=0, le=1e7, description="hours of training, without the pauses between its starts"
    )
    device_hours: float | None = Field(
        None, gt=0, le=1e12, description="the same, times the devices: GPUs, or processes on CPUs"
    )
    money: float | None = Field(
        None, gt=0, le=1e12, description="price of its nodes, by price_per_hour of the cluster file"
    )
    kwh: float | None = Field(
        None, gt=0, le=1e12, description="energy of its nodes at full load, by their power in the cluster"
    )
    idle_minutes: float | None = Field(
        None, gt=0, le=1e6, description="minutes without work after which the devices are given back"
    )
    idle_utilization: float = Field(
        0.05, gt=0, lt=1, description="utilization of the devices of node 0 below which they do no work"
    )
