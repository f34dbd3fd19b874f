"""Spending of a run, over all its starts: time, device time, energy and price."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from wanma.job.cluster import Cluster
from wanma.job.run.worker import Event
from wanma.planner.forecast.run_cost import FULL_LOAD, price_run

JOULES_PER_KWH = 3.6e6


@dataclass
class Spending:
    """Time of a run from each start to its last record, in seconds, and the same times devices and nodes."""

    seconds: float = 0.0
    device_seconds: float = 0.0
    node_seconds: float = 0.0
    step_seconds: float = 0.0
    """Time of the newest step."""
    longest_step_seconds: float = 0.0
    """Time of the longest step so far, of all starts."""
    devices: int = 0
    nodes: int = 1
    _newest: float | None = None
    """Time of the newest record, in unix seconds; None: the run is between two starts."""

    def add(self, event: Event) -> None:
        """Take an event of the run, or a step with the kind `step`, in the order of their time."""
        now = event.get("time")
        if event["kind"] == "start":
            if event.get("step", 0) == 0 and not event.get("is_restart"):
                # another training in the folder
                self.seconds = self.device_seconds = self.node_seconds = self.longest_step_seconds = 0.0
            if not event.get("is_restart"):
                self._newest = None
            self.devices, self.nodes = event.get("world_size", 0), event.get("nodes", 1)
        elif event["kind"] == "step":
            self.step_seconds = event.get("step_seconds") or 0.0
            self.longest_step_seconds = max(self.longest_step_seconds, self.step_seconds)
        elif self._newest is None:
            return  # a message between two starts
        if now is not None:
            passed = 0.0 if self._newest is None else max(now - self._newest, 0.0)
            self.seconds += passed
            self.device_seconds += passed * self.devices
            self.node_seconds += passed * self.nodes
            self._newest = max(now, self._newest or now)
        if event["kind"] == "finish":
            self._newest = None

    def add_all(self, records: Iterable[Event]) -> Spending:
        """Take the records of earlier starts; return this object."""
        for record in records:
            self.add(record)
        self._newest = None
        return self


@dataclass(frozen=True)
class NodeRates:
    """Price of a node per hour and its power at full load, as means over a cluster; None: unknown."""

    price_per_hour: float | None
    watts: float | None

    @classmethod
    def of(cls, cluster: Cluster) -> NodeRates:
        """Return the rates of a cluster."""
        groups = [(group, group.count) for group in cluster.nodes]
        cost = price_run(3600.0, groups, FULL_LOAD)
        count = sum(number for _, number in groups)
        return cls(
            None if cost.price is None else cost.price / count,
            None if cost.energy_joules is None else cost.energy_joules / 3600.0 / count,
        )
