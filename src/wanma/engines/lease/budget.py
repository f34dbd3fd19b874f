"""Watch over the budget of a run and over idle devices, which asks for an orderly end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from wanma.engines.lease.spending import JOULES_PER_KWH, NodeRates, Spending
from wanma.job.cluster import Cluster
from wanma.job.errors import EXIT_USAGE, JobError, WanmaError
from wanma.job.run.worker import Event
from wanma.job.sections.cluster import BudgetSection
from wanma.observe.alerts.monitor import USAGE_EVENT

STEPS_AHEAD = 2
"""Steps that a run still does after the request to end: the one that it is in, and the next."""


class BudgetWatch:
    """Watch over a run, on the node of rank 0.

    Args:
        settings: section [cluster.budget] of the job.
        cluster: cluster of the plan.
        records: records of the run's earlier starts, oldest first.

    Raises:
        JobError: a limit is of a kind that the cluster has no rate for.
        WanmaError: the budget is used up.
    """

    def __init__(self, settings: BudgetSection, cluster: Cluster, records: Iterable[Event]) -> None:
        self._settings, self._rates = settings, NodeRates.of(cluster)
        self._refuse_unknown_rates()
        self._spending = Spending().add_all(records) if self._has_limit() else Spending()
        self._idle = IdleTime(settings.idle_utilization)
        self._has_asked = False
        # A run that its budget has ended kept clear of the limit by some steps, the longest at most.
        ahead = STEPS_AHEAD * self._spending.longest_step_seconds
        for (key, used, limit), (_, reached, _) in zip(self._used(), self._used(ahead), strict=True):
            if reached >= limit:
                raise WanmaError(
                    f"cluster.budget.{key} = {limit:g} is used up: {used:.4g} by this run's earlier starts",
                    f"raise it to go on, e.g. cluster.budget.{key}={2 * limit:g}",
                    EXIT_USAGE,
                )

    def on_event(self, event: Event) -> str | None:
        """Take an event of the run; return the reason for which it shall end in order, once; else None.

        The events with the use of a node come by time, also of ranks that wait at a prompt.
        """
        if event["kind"] == USAGE_EVENT:
            if event["node"]:
                return None  # the node of rank 0 alone watches
            self._idle.add(event)
        if self._has_limit():
            self._spending.add(event)
        reason = None if self._has_asked else self._reason()
        self._has_asked |= reason is not None
        return reason

    def _reason(self) -> str | None:
        minutes = self._settings.idle_minutes
        if minutes is not None and self._idle.seconds >= 60 * minutes:
            return (
                f"the devices were below {self._settings.idle_utilization:.0%} for {minutes:g} minutes "
                "(cluster.budget.idle_minutes)"
            )
        ahead = STEPS_AHEAD * self._spending.step_seconds
        for key, used, limit in self._used(ahead):
            if used >= limit:
                return f"cluster.budget.{key} = {limit:g} is used up"
        return None

    def _has_limit(self) -> bool:
        return any(limit is not None for limit in self._limits().values())

    def _limits(self) -> dict[str, float | None]:
        return {key: getattr(self._settings, key) for key in ("hours", "device_hours", "money", "kwh")}

    def _used(self, ahead_seconds: float = 0.0) -> Iterator[tuple[str, float, float]]:
        """Yield key, use after `ahead_seconds` more, and limit, of each limit that is set."""
        spending, rates = self._spending, self._rates
        node_hours = (spending.node_seconds + ahead_seconds * spending.nodes) / 3600
        used = {
            "hours": (spending.seconds + ahead_seconds) / 3600,
            "device_hours": (spending.device_seconds + ahead_seconds * spending.devices) / 3600,
            "money": node_hours * (rates.price_per_hour or 0.0),
            "kwh": node_hours * 3600 * (rates.watts or 0.0) / JOULES_PER_KWH,
        }
        for key, limit in self._limits().items():
            if limit is not None:
                yield key, used[key], limit

    def _refuse_unknown_rates(self) -> None:
        for key, rate, field in (
            ("money", self._rates.price_per_hour, "price_per_hour"),
            ("kwh", self._rates.watts, "power_watts"),
        ):
            if getattr(self._settings, key) is not None and rate is None:
                raise JobError(
                    f"cluster.budget.{key}: the cluster has no {field} for all its nodes",
                    f"give a cluster file with {field} (cluster.file), or limit cluster.budget.device_hours",
                )


class IdleTime:
    """Time for which the devices of a node have done no work.

    Args:
        utilization: utilization below which they do none.
    """

    def __init__(self, utilization: float) -> None:
        self._utilization = utilization
        self._since: float | None = None
        """Time since which they do none, in unix seconds; None: they work, or it is not known yet."""
        self._cpu: deque[tuple[float, float]] = deque(maxlen=2)
        """Times of the newest two readings, and the processor time of the ranks so far."""
        self.seconds = 0.0

    def add(self, usage: Event) -> None:
        """Take a reading of the node's use."""
        busy = self._busy_share(usage)
        if busy is None or busy >= self._utilization:
            self._since, self.seconds = None, 0.0
            return
        self._since = usage["time"] if self._since is None else self._since
        self.seconds = usage["time"] - self._since

    def _busy_share(self, usage: Event) -> float | None:
        """Return the share of the busiest GPU of the run; without GPUs, of a core for each rank."""
        gpus: list[float] = [
            gpu["utilization"]
            for gpu in usage.get("gpus", ())
            if gpu.get("is_used") and gpu.get("utilization") is not None
        ]
        ranks = usage.get("ranks") or ()
        self._cpu.append((usage["time"], sum(rank["cpu_seconds"] for rank in ranks)))
        if gpus:
            return max(gpus)
        if not ranks or len(self._cpu) < 2:
            return None
        (before, used_before), (now, used) = self._cpu
        return float((used - used_before) / max((now - before) * len(ranks), 1e-9))
