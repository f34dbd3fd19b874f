"""Monitor that evaluates the rules of alerts during a run, from the events that its supervisor sees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from wanma.job.run.worker import Event
from wanma.observe.alerts.expressions import History
from wanma.observe.alerts.rules import HOUR, RULES, RUN_FAILED, Rule
from wanma.observe.series.run_series import Labels, NodeSeries, RunSeries, Sample

USAGE_EVENT = "usage"
"""Kind of the events with the use of a node, which its supervisor makes every few seconds."""

_NO_LABELS = dict.fromkeys(("node", "rank", "gpu"), "")
"""Labels of an alert's series; all series of a metric must have the same, and an empty one counts as none."""


class AlertMonitor:
    """Monitor of one node; rules over the whole run fire on the node of rank 0, which sees its steps.

    Its plan and interval are those of `RunSeries`; without rules nothing is evaluated.
    """

    def __init__(
        self,
        plan: Mapping[str, Any] | None = None,
        checkpoint_interval_steps: int = 0,
        rules: Sequence[Rule] = RULES,
    ) -> None:
        self._run = RunSeries(plan, checkpoint_interval_steps)
        self._node: NodeSeries | None = None
        self._rules = {rule.name: rule for rule in rules}
        self._history = History(HOUR)  # the longest window of a rule
        self._since: dict[tuple[str, Labels], float] = {}
        """Time since which the condition of a rule holds for a series."""
        self._firing: set[tuple[str, Labels]] = set()

    def on_event(self, event: Event) -> list[Event]:
        """Take an event of the run; return an event of kind `alert` for each alert that fires or resolves."""
        if event["kind"] != USAGE_EVENT:
            self._run.update(event)
            return []
        self._node = NodeSeries(event)  # its number may change when others are lost
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
        firing = sorted(self._firing)
        self._firing.clear()
        self._since.clear()
        if failure is not None:
            return [_event(RUN_FAILED, (), 0.0, now, text=f"{RUN_FAILED.name}: {failure}")]
        return [_event(self._rules[name], labels, 0.0, now, is_firing=False) for name, labels in firing]

    def samples(self) -> Iterator[Sample]:
        """Yield the present values of the metrics, with those of the alerts that fire."""
        yield from self._run.samples()
        if self._node is not None:
            yield from self._node.samples()
        for name, labels in self._firing:
            named = {"alert": name, "severity": self._rules[name].severity, **_NO_LABELS, **dict(labels)}
            yield Sample("alert", tuple(sorted(named.items())), 1.0)

    def _changes(self, now: float) -> Iterator[Event]:
        for rule in self._rules.values():
            values = rule.condition.evaluate(self._history)
            for labels, value in values.items():
                key = (rule.name, labels)
                since = self._since.setdefault(key, now)
                if key not in self._firing and now - since >= rule.for_seconds:
                    self._firing.add(key)
                    yield _event(rule, labels, value, now, is_firing=True)
            for key in [key for key in self._since if key[0] == rule.name and key[1] not in values]:
                del self._since[key]
                if key in self._firing:
                    self._firing.remove(key)
                    yield _event(rule, key[1], 0.0, now, is_firing=False)


def _event(
    rule: Rule, labels: Labels, value: float, now: float, *, is_firing: bool = True, text: str = ""
) -> Event:
    named = " ".join(f"{name} {text}" for name, text in labels) or "the run"
    if not text:
        text = f"{rule.name} is resolved"
        if is_firing:
            text = f"{rule.name}: {rule.summary.format(labels=named, value=value)}\n  {rule.causes[0]}"
    return {
        "kind": "alert",
        "time": now,
        "alert": rule.name,
        "severity": rule.severity,
        "labels": dict(labels),
        "is_firing": is_firing,
        "level": rule.severity.replace("critical", "error") if is_firing else "info",
        "text": text,
    }
