"""Delivery of alerts to a webhook and a command."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from support.webhook import Webhook
from wanma.job.errors import JobError
from wanma.job.sections.observe import ObserveSection
from wanma.observe.alerts import sinks
from wanma.observe.alerts.sinks import AlertSinks, render_body

NAMES = {"run": "gpt", "job": "tuned"}
EVENT = {
    "kind": "alert",
    "alert": "DataWait",
    "severity": "warning",
    "text": 'waits\n"30 %"',
    "is_firing": True,
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = dataclasses.replace(sinks.RETRY_POLICY, initial_backoff_seconds=0.0)
    monkeypatch.setattr(sinks, "RETRY_POLICY", policy)


def deliver(settings: ObserveSection) -> list[str]:
    warnings: list[str] = []
    alerts = AlertSinks(settings, NAMES, warnings.append)
    alerts.send(dict(EVENT))
    alerts.close()
    return warnings


def test_a_webhook_gets_the_event_or_a_body_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with Webhook(503) as webhook:
        monkeypatch.setenv("HOOK", webhook.url)
        assert deliver(ObserveSection(alert_webhook="env:HOOK")) == []
        assert json.loads(webhook.bodies[-1]) == {**EVENT, **NAMES}
        assert deliver(ObserveSection(alert_webhook="env:HOOK", alert_body='{"text": "{run}: {text}"}')) == []
        assert json.loads(webhook.bodies[-1]) == {"text": 'gpt: waits\n"30 %"'}


def test_a_webhook_that_refuses_is_told_once_without_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with Webhook(*[500] * 10) as webhook:
        monkeypatch.setenv("HOOK", webhook.url)
        (warning,) = deliver(ObserveSection(alert_webhook="env:HOOK"))
    assert "status 500" in warning
    assert webhook.url not in warning
    assert len(webhook.bodies) == sinks.RETRY_POLICY.max_attempts == 3


def test_a_command_reads_the_event(tmp_path: Path) -> None:
    file = tmp_path / "alert.json"
    program = f"import sys, pathlib; pathlib.Path({str(file)!r}).write_text(sys.stdin.read())"
    assert deliver(ObserveSection(alert_command=[sys.executable, "-c", program])) == []
    assert json.loads(file.read_text())["alert"] == "DataWait"
    command = [sys.executable, "-c", "raise SystemExit('no route')"]
    (warning,) = deliver(ObserveSection(alert_command=command))
    assert "exit code 1: no route" in warning


@pytest.mark.parametrize("value", ["env:UNSET_HOOK", "file:/nowhere"])
def test_the_source_of_a_webhook_must_have_an_address(value: str) -> None:
    with pytest.raises(JobError, match=r"observe\.alert_webhook"):
        AlertSinks(ObserveSection(alert_webhook=value), NAMES, print)


def test_an_address_that_no_request_can_have_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK", "http://127.0.0.1/a secret")
    (warning,) = deliver(ObserveSection(alert_webhook="env:HOOK"))
    assert "InvalidURL" in warning
    assert "secret" not in warning


def test_a_body_keeps_braces_that_name_nothing() -> None:
    assert render_body('{"a": {"b": "{alert}"}}', EVENT) == '{"a": {"b": "DataWait"}}'
