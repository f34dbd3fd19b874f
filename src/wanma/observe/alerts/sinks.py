"""Sinks of alerts: a webhook and a command, called in a thread of their own."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from wanma.job.errors import JobError
from wanma.job.run.secret_source import read_secret
from wanma.job.run.worker import Event

WEBHOOK_KEY = "observe.alert_webhook"
DEADLINE_SECONDS = 10.0
"""Time that a webhook or a command may take for one alert."""
ATTEMPTS = 3
"""Attempts to deliver an alert; before each next one the time to wait doubles, from a second."""
CLOSE_SECONDS = 15.0
"""Time, at the end of a run, for the alerts that wait to be delivered."""


@dataclass(frozen=True)
class SinkConfig:
    """Destinations of a run's alerts."""

    webhook: str = ""
    """`env:NAME` or `file:PATH` from which its URL is read; empty: none."""
    body: str = ""
    """Template of the request's body; empty: the event as JSON."""
    command: Sequence[str] = ()
    """Words of a command, which reads the event as JSON; empty: none."""


class AlertSinks:
    """Sinks of one run; a context manager, which delivers what waits before it ends.

    Args:
        config: sinks.
        run: name of the run, which each event gets.
        warn: shows a text to the user: a sink does not work.
    """

    def __init__(self, config: SinkConfig, run: str, warn: Callable[[str], object]) -> None:
        self._config, self._run, self._warn = config, run, warn
        self._url = read_webhook(config.webhook)
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._has_warned = False
        self._thread: threading.Thread | None = None

    def send(self, event: Event) -> None:
        """Deliver an event, later."""
        if not self._url and not self._config.command:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._deliver_all, daemon=True, name="wanma-alerts")
            self._thread.start()
        self._queue.put({**event, "run": self._run})

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(CLOSE_SECONDS)

    def _deliver_all(self) -> None:
        while (event := self._queue.get()) is not None:
            if self._url:
                self._deliver(WEBHOOK_KEY, self._post, event)
            if self._config.command:
                self._deliver("observe.alert_command", self._call, event)

    def _deliver(self, key: str, send: Callable[[Event], None], event: Event) -> None:
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(2.0 ** (attempt - 1))
            try:
                send(event)
            except Exception as error:  # also what http.client raises; the next alert is tried again
                failure = error
            else:
                return
        if not self._has_warned:
            self._has_warned = True
            self._warn(f"an alert was not delivered: {key}: {_cause(failure)}")

    def _post(self, event: Event) -> None:
        import urllib.request

        body = (render_body(self._config.body, event) if self._config.body else json.dumps(event)).encode()
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS):
            pass

    def _call(self, event: Event) -> None:
        subprocess.run(
            list(self._config.command),
            input=json.dumps(event).encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=DEADLINE_SECONDS,
            check=True,
        )


def read_webhook(value: str) -> str:
    """Return the URL of a webhook, which is a secret of many services.

    Raises:
        JobError: the variable or file is missing, or it is no URL.
    """
    url = read_secret(value, WEBHOOK_KEY)
    if url and not url.startswith(("http://", "https://")):
        raise JobError(f"{WEBHOOK_KEY} = {value!r} gives no URL of http or https")
    return url


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
