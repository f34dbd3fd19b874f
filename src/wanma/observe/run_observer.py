"""Observer of a run on one node: its metrics endpoint, its alerts and their sinks, fed with its events."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.secret_source import read_secret
from wanma.job.run.worker import Event
from wanma.job.sections.observe import ObserveSection
from wanma.observe.alerts.monitor import AlertMonitor
from wanma.observe.alerts.sinks import AlertSinks, SinkConfig
from wanma.observe.series.run_series import Sample

if TYPE_CHECKING:
    from wanma.observe.trackers.process import TrackerProcess


class RunObserver:
    """Observer; a context manager around the run.

    Args:
        run: run directory.
        settings: section [observe] of the job.
        node: node rank of this node.
        hostname: name of this host.
        checkpoint_interval_steps: steps between two checkpoints, by the job; 0: there are none.
        plan: content of plan.json.
        show: shows an event of kind `message` or `alert`, and records it where rank 0 is.

    Raises:
        JobError: a secret is missing, or metrics would be open to other machines.
        WanmaError: the package `prometheus-client` is not installed.
    """

    def __init__(
        self,
        run: RunDirectory,
        settings: ObserveSection,
        *,
        node: int,
        hostname: str,
        checkpoint_interval_steps: int,
        plan: Mapping[str, Any],
        show: Callable[[Event], object],
    ) -> None:
        self._show, self._lock, self._stack = show, threading.Lock(), ExitStack()
        self._monitor = AlertMonitor(plan, checkpoint_interval_steps)
        self._has_alerts = settings.alerts
        self._trackers = _start_trackers(run, settings.trackers) if node == 0 else None
        config = SinkConfig(settings.alert_webhook, settings.alert_body, tuple(settings.alert_command))
        self._sinks = AlertSinks(config, run.name, self._warn)
        if settings.metrics_port is None:
            return
        from wanma.observe.endpoint import MetricsEndpoint, remove_stale_targets

        self._endpoint = MetricsEndpoint(
            settings.metrics_host,
            settings.metrics_port,
            read_secret(settings.metrics_token, "observe.metrics_token"),
            self._samples,
            {"run": run.name},
            self._warn,
        )
        labels = {"run": run.name, "node": str(node), "host": hostname}
        remove_stale_targets(run.path.parent)
        self._endpoint.announce(run.path.parent, f"{run.name}-{node}", labels)
        self._stack.enter_context(self._endpoint)

    def on_event(self, event: Event) -> None:
        """Take an event of the run; alerts that it makes fire or resolve are shown and delivered."""
        with self._lock:
            changes = self._monitor.on_event(event)
        self._tell(changes)

    def set_plan(self, plan: Mapping[str, Any]) -> None:
        """Take the forecast of another plan, under which the run goes on."""
        with self._lock:
            self._monitor.set_plan(plan)

    def _samples(self) -> list[Sample]:
        with self._lock:
            return list(self._monitor.samples())

    def _tell(self, changes: list[Event]) -> None:
        if not self._has_alerts:
            return
        for change in changes:
            self._show(change)
            self._sinks.send(change)

    def _warn(self, text: str) -> None:
        self._show({"kind": "message", "time": time.time(), "level": "warning", "text": text})

    def __enter__(self) -> Self:
        return self

    def end(self, failure: str | None) -> None:
        """Resolve what still fires; a failure of the run is an alert instead.

        Args:
            failure: message of a failed run; None: it did not fail.
        """
        with self._lock:
            changes = self._monitor.end(time.time(), failure)
        self._tell(changes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sinks.close()
        if self._trackers is not None:
            self._trackers.close(self._warn)
        self._stack.close()


def _start_trackers(run: RunDirectory, names: Sequence[str]) -> TrackerProcess | None:
    if not names:
        return None
    from wanma.observe.trackers.process import TrackerProcess

    return TrackerProcess(run, names)
