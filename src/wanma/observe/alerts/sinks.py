"""Sinks of alerts: a webhook and a command, called in a thread of their own."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from collections.abc import Callable, Mapping
from typing import Any

from wanma.job.errors import JobError
from wanma.job.retry import RetryPolicy, retry
from wanma.job.run.secret_source import read_secret
from wanma.job.run.worker import Event
from wanma.job.sections.observe import ObserveSection

WEBHOOK_KEY = "observe.alert_webhook"
DEADLINE_SECONDS = 10.0
"""Time that a webhook or a command may take for one alert."""
RETRY_POLICY = RetryPolicy(max_attempts=3, initial_backoff_seconds=1.0)
CLOSE_SECONDS = 15.0
"""Time, at the end of a run, for the alerts that wait to be delivered."""


class AlertSinks:
    """Sinks of one run; `close` delivers what waits.

    Args:
        names: names of the run and its job, which each event gets.
        warn: shows a text to the user: a sink does not work.

    Raises:
        JobError: the variable or file of the webhook is missing, or has no URL.
    """

    def __init__(
        self, settings: ObserveSection, names: Mapping[str, str], warn: Callable[[str], object]
    ) -> None:
        self._settings, self._names, self._warn = settings, names, warn
        self._url = read_secret(settings.alert_webhook, WEBHOOK_KEY)
        if self._url and not self._url.startswith(("http://", "https://")):
            raise JobError(f"{WEBHOOK_KEY} = {settings.alert_webhook!r} gives no URL of http or https")
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._has_warned = False
        self._thread: threading.Thread | None = None

    def send(self, event: Event) -> None:
        """Deliver an event, later."""
        if not self._url and not self._settings.alert_command:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._deliver_all, daemon=True, name="wanma-alerts")
            self._thread.start()
        self._queue.put({**event, **self._names})

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(CLOSE_SECONDS)

    def _deliver_all(self) -> None:
        while (event := self._queue.get()) is not None:
            if self._url:
                self._deliver(WEBHOOK_KEY, self._post, event)
            if self._settings.alert_command:
                self._deliver("observe.alert_command", self._call, event)

    def _deliver(self, key: str, send: Callable[[Event], None], event: Event) -> None:
        try:
            retry(lambda: send(event), RETRY_POLICY)
        except Exception as error:  # also what http.client raises; the next alert is tried again
            if not self._has_warned:
                self._has_warned = True
                self._warn(f"an alert was not delivered: {key}: {_cause(error)}")

    def _post(self, event: Event) -> None:
        import urllib.request

        body = (
            render_body(self._settings.alert_body, event) if self._settings.alert_body else json.dumps(event)
        ).encode()
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS):
            pass

    def _call(self, event: Event) -> None:
        subprocess.run(
            self._settings.alert_command,
            input=json.dumps(event).encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=DEADLINE_SECONDS,
            check=True,
        )


def render_body(template: str, event: Event) -> str:
    """Return the template with `{text}`, `{alert}`, … replaced by the event's values, escaped as in JSON."""
    body = template
    for name, value in event.items():
        text = value if isinstance(value, str) else json.dumps(value)
        body = body.replace("{" + name + "}", json.dumps(text)[1:-1])
    return body


def _cause(error: Any) -> str:
    """Return the cause in words, without the URL."""
    if (status := getattr(error, "code", None)) is not None:
        return f"HTTP status {status}"
    if isinstance(error, subprocess.CalledProcessError):
        return f"exit code {error.returncode}: {error.stderr.decode(errors='replace').strip()[-200:]}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no end within {DEADLINE_SECONDS:g} s"
    return str(getattr(error, "reason", "") or getattr(error, "strerror", "") or type(error).__name__)
