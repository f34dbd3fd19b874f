"""Delivery of alerts to a webhook and a command."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from wanma.job.errors import JobError
from wanma.observe.alerts import sinks
from wanma.observe.alerts.sinks import AlertSinks, SinkConfig, render_body

EVENT = {
    "kind": "alert",
    "alert": "DataWait",
    "severity": "warning",
    "text": 'waits\n"30 %"',
    "is_firing": True,
}


class Receiver:
    """Webhook that answers with the statuses given, then with 200."""

    def __init__(self, *statuses: int) -> None:
        self.bodies: list[str] = []
        remaining = list(statuses)
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bodies.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
                self.send_response(remaining.pop(0) if remaining else 200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/hook"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks.time, "sleep", lambda _: None)


def deliver(config: SinkConfig) -> list[str]:
    warnings: list[str] = []
    alerts = AlertSinks(config, "gpt", warnings.append)
    alerts.send(dict(EVENT))
    alerts.close()
    return warnings


def test_a_webhook_gets_the_event_or_a_body_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = Receiver(503)
    monkeypatch.setenv("HOOK", receiver.url)
    assert deliver(SinkConfig("env:HOOK")) == []
    assert json.loads(receiver.bodies[-1]) == {**EVENT, "run": "gpt"}
    assert deliver(SinkConfig("env:HOOK", '{"text": "{run}: {text}"}')) == []
    assert json.loads(receiver.bodies[-1]) == {"text": 'gpt: waits\n"30 %"'}


def test_a_webhook_that_refuses_is_told_once_without_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = Receiver(*[500] * 10)
    monkeypatch.setenv("HOOK", receiver.url)
    (warning,) = deliver(SinkConfig("env:HOOK"))
    assert "status 500" in warning
    assert receiver.url not in warning
    assert len(receiver.bodies) == sinks.ATTEMPTS


def test_a_command_reads_the_event(tmp_path: Path) -> None:
    file = tmp_path / "alert.json"
    program = f"import sys, pathlib; pathlib.Path({str(file)!r}).write_text(sys.stdin.read())"
    assert deliver(SinkConfig(command=(sys.executable, "-c", program))) == []
    assert json.loads(file.read_text())["alert"] == "DataWait"
    (warning,) = deliver(SinkConfig(command=(sys.executable, "-c", "raise SystemExit('no route')")))
    assert "exit code 1: no route" in warning


@pytest.mark.parametrize("value", ["https://hooks.example/secret", "env:UNSET_HOOK", "file:/nowhere"])
def test_a_webhook_must_come_from_outside_the_job_file(value: str) -> None:
    with pytest.raises(JobError, match=r"observe\.alert_webhook") as caught:
        AlertSinks(SinkConfig(value), "gpt", print)
    assert "hooks.example" not in str(caught.value)


def test_a_body_keeps_braces_that_name_nothing() -> None:
    assert render_body('{"a": {"b": "{alert}"}}', EVENT) == '{"a": {"b": "DataWait"}}'
