"""Monitor that evaluates the rules of alerts during a run, from the events that its supervisor sees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wanma.job.run.worker import Event
from wanma.observe.alerts.expressions import History
from wanma.observe.alerts.rules import LONGEST_WINDOW_SECONDS, RULES, RUN_FAILED, Rule
from wanma.observe.series.run_series import Labels, NodeSeries, RunSeries, Sample

USAGE_EVENT = "usage"
"""Kind of the events with the use of a node, which its supervisor makes every few seconds."""
ALERT_EVENT = "alert"
"""Kind of the events that tell of an alert."""


@dataclass
class _Pending:
    """Series whose condition holds."""

    since: float
    is_firing: bool = False


class AlertMonitor:
    """Monitor of one node; rules over the whole run fire on the node of rank 0, which sees its steps.

    Args:
        plan: content of plan.json.
        checkpoint_interval_steps: steps between two checkpoints, by the job; 0: there are none.
        rules: rules; empty: nothing is evaluated.
    """

    def __init__(
        self,
        plan: Mapping[str, Any] | None = None,
        checkpoint_interval_steps: int = 0,
        rules: Sequence[Rule] = RULES,
    ) -> None:
        self._run = RunSeries(plan, checkpoint_interval_steps)
        self._node: NodeSeries | None = None
        self._rules = rules
        self._history = History(LONGEST_WINDOW_SECONDS)
        self._pending: dict[tuple[str, Labels], _Pending] = {}

    def on_event(self, event: Event) -> list[Event]:
        """Take an event of the run; return an event of kind `alert` for each alert that fires or resolves."""
        if event["kind"] != USAGE_EVENT:
            self._run.update(event)
            return []
        self._node = NodeSeries(event["node"])  # its number may change when others are lost
        self._node.update(event)
        self._run.mark_alive(any(rank["is_alive"] for rank in event["ranks"]))
        if not self._rules:
            return []
        self._history.record(event["time"], self.samples())
        return list(self._changes(event["time"]))

    def replay(self, records: Iterable[Event]) -> None:
        """Take the records of earlier starts of the run."""
        self._run.replay(records)

    def end(self, now: float, failure: str | None) -> list[Event]:
        """Return the events of the end: that of a failure, or those that resolve what still fires."""
        firing = [key for key, pending in self._pending.items() if pending.is_firing]
        self._pending.clear()
        if failure is not None:
            return [_event(RUN_FAILED, (), 0.0, now, text=f"{RUN_FAILED.name}: {failure}")]
        rules = {rule.name: rule for rule in self._rules}
        return [_event(rules[name], labels, 0.0, now, is_firing=False) for name, labels in firing]

    def set_plan(self, plan: Mapping[str, Any]) -> None:
        """Take the forecast of another plan."""
        self._run.set_plan(plan)

    def samples(self) -> Iterator[Sample]:
        """Yield the present values of the metrics, with those of the alerts that fire."""
        yield from self._run.samples()
        if self._node is not None:
            yield from self._node.samples()
        severities = {rule.name: rule.severity for rule in self._rules}
        for (name, labels), pending in self._pending.items():
            if pending.is_firing and not labels:
                yield Sample("alert", (("alert", name), ("severity", severities[name])), 1.0)

    def _changes(self, now: float) -> Iterator[Event]:
        for rule in self._rules:
            values = rule.condition.evaluate(self._history)
            for labels, value in values.items():
                pending = self._pending.setdefault((rule.name, labels), _Pending(now))
                if not pending.is_firing and now - pending.since >= rule.for_seconds:
                    pending.is_firing = True
                    yield _event(rule, labels, value, now, is_firing=True)
            for key in [key for key in self._pending if key[0] == rule.name and key[1] not in values]:
                if self._pending.pop(key).is_firing:
                    yield _event(rule, key[1], 0.0, now, is_firing=False)


def _event(
    rule: Rule, labels: Labels, value: float, now: float, *, is_firing: bool = True, text: str = ""
) -> Event:
    return {
        "kind": ALERT_EVENT,
        "time": now,
        "alert": rule.name,
        "severity": rule.severity,
        "labels": dict(labels),
        "is_firing": is_firing,
        "level": rule.severity.replace("critical", "error") if is_firing else "info",
        "text": text or (alert_text(rule, labels, value) if is_firing else f"{rule.name} is resolved"),
    }


def alert_text(rule: Rule, labels: Labels, value: float) -> str:
    """Return what happens, and the most frequent cause with its way out."""
    named = " ".join(f"{name} {text}" for name, text in labels) or "the run"
    return f"{rule.name}: {rule.summary.format(labels=named, value=value)}\n  {rule.causes[0]}"
