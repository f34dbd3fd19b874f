"""A wait for what another process or thread brings about."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 120, pause: float = 0.2) -> Any:
    """Wait until a condition holds, which may raise an OSError until then; return its value."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if value := condition():
                return value
        except OSError:
            pass
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(pause)
