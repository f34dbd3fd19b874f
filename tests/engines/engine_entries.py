"""Entry functions for the tests of engines."""

from __future__ import annotations

import time
from typing import Any


def square(worker: Any, payload: bytes) -> None:
    print("squaring")
    worker.supervisor_client.send_event({"kind": "finish", "square": int(payload) ** 2})


def fail(worker: Any, payload: bytes) -> None:
    raise ValueError("too square")


def until_stopped(worker: Any, payload: bytes) -> None:
    (worker.run_directory / "running").touch()
    while not worker.supervisor_client.is_drain_requested():
        time.sleep(0.01)
    print("stopped in order")
