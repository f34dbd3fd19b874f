"""Observer of a run on one node: its metrics endpoint, its alerts and their sinks, fed with its events.

A fault of the observer ends no training: it is told once, and the run goes on.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Self

from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.secret_source import read_secret
from wanma.job.run.worker import Event
from wanma.job.sections.observe import ObserveSection
from wanma.observe.alerts.monitor import USAGE_EVENT, AlertMonitor
from wanma.observe.alerts.rules import RULES, RUN_FAILED
from wanma.observe.alerts.sinks import AlertSinks
from wanma.observe.console.record_follower import read_records
from wanma.observe.series.run_series import Sample
from wanma.observe.sinks.jsonl import append_concurrent_event

if TYPE_CHECKING:
    from wanma.observe.endpoint import MetricsEndpoint
    from wanma.observe.trackers.process import TrackerProcess


class RunObserver:
    """Observer; a context manager around the run.

    Args:
        settings: section [observe] of the job; its trackers are checked (`check_trackers`).
        node: node rank of this node; None: it is that of the first event of kind `usage`.
        checkpoint_interval_steps: steps between two checkpoints, by the job; 0: there are none.
        show: shows an event of kind `message` or `alert`.
        began: time in unix seconds before which records are those of earlier starts; None: now.

    Raises:
        JobError: a secret is missing, or metrics would be open to other machines.
        WanmaError: a package that is needed is not installed.
    """

    def __init__(
        self,
        run: RunDirectory,
        settings: ObserveSection,
        *,
        node: int | None,
        checkpoint_interval_steps: int,
        plan: Mapping[str, Any],
        show: Callable[[Event], object],
        began: float | None = None,
    ) -> None:
        self._run, self._settings, self._show = run, settings, show
        self._lock, self._stack = threading.Lock(), ExitStack()
        self._monitor = AlertMonitor(plan, checkpoint_interval_steps, RULES if settings.alerts else ())
        self._node: int | None = None
        self._has_failed = False
        self._endpoint: MetricsEndpoint | None = None
        self._trackers: TrackerProcess | None = None
        if settings.metrics_port is not None and node in (0, None):  # its endpoint has totals of the run
            with self._guard():
                self._monitor.replay(read_records(run, time.time() if began is None else began))
        self._names = {"run": run.name, "job": settings.name or run.name}
        self._sinks = AlertSinks(settings, self._names, self._warn)
        if settings.metrics_port is not None:
            self._open_endpoint(settings.metrics_port)
        if node is not None:
            with self._guard():
                self._set_node(node)

    def _open_endpoint(self, port: int) -> None:
        from wanma.observe.endpoint import MetricsEndpoint

        self._endpoint = MetricsEndpoint(
            self._settings.metrics_host,
            port,
            read_secret(self._settings.metrics_token, "observe.metrics_token"),
            self._samples,
            {"run": self._names["run"]},
            self._warn,
        )
        self._stack.enter_context(self._endpoint)

    def _set_node(self, node: int) -> None:
        """Take this node's number: announce its endpoint, and start the trackers where rank 0 is."""
        self._node = node
        if self._endpoint is not None:
            # Series have the run and the node themselves; Prometheus would rename one of two equal labels.
            # The job of the target replaces that of the scrape configuration.
            labels = {"host": socket.gethostname(), "job": self._names["job"]}
            self._endpoint.announce(self._run.path.parent, f"{self._run.name}-{node}", labels)
        if node == 0 and self._settings.trackers and self._trackers is None:
            from wanma.observe.trackers.process import TrackerProcess

            self._trackers = TrackerProcess(self._run, self._settings.trackers)

    def on_event(self, event: Event) -> None:
        """Take an event of the run; alerts that it makes fire or resolve are shown and delivered."""
        with self._guard():
            if event["kind"] == USAGE_EVENT and event["node"] != self._node:
                self._set_node(event["node"])
            with self._lock:
                changes = self._monitor.on_event(event)
            self._tell(changes)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Turn an exception into a warning; only the first one is shown."""
        try:
            yield
        except Exception as error:  # a record of any kind must not end the training
            if not self._has_failed:
                self._has_failed = True
                self._warn(f"the run is not observed completely: {type(error).__name__}: {error}")

    def _samples(self) -> list[Sample]:
        with self._lock:
            return list(self._monitor.samples())

    def _tell(self, changes: list[Event]) -> None:
        if not self._settings.alerts:
            return
        for change in changes:
            self._sinks.send(change)
            if change["alert"] == RUN_FAILED.name:
                continue  # the command shows and records the failure itself
            self._show(change)
            if self._node == 0:
                append_concurrent_event(self._run, **change)

    def _warn(self, text: str) -> None:
        self._show({"kind": "message", "time": time.time(), "level": "warning", "text": text})

    def __enter__(self) -> Self:
        return self

    def end(self, failure: str | None) -> None:
        """Resolve what still fires; the message of a failure is an alert of the node of rank 0 instead."""
        own_failure = failure if self._node in (0, None) else None
        with self._guard():
            with self._lock:
                changes = self._monitor.end(time.time(), own_failure)
            self._tell(changes)

    def __exit__(self, *_: object) -> None:
        with self._guard():
            self._sinks.close()
            if self._trackers is not None:
                self._trackers.close(self._warn)
        self._stack.close()
