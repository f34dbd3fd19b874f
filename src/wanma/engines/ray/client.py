"""Client of the bridge to Ray: one process for each address, whose answers have deadlines."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import select
import subprocess
import sys
import threading
import time
from typing import Any

from wanma.engines.engine import QUERY_SECONDS
from wanma.job.errors import EXIT_USAGE, WanmaError

CONNECT_SECONDS = 30.0
"""Deadline, in seconds, of the first answer: Ray is imported and connected before."""


def missing_ray() -> str | None:
    """Return the reason why Ray cannot be imported here; None: it can."""
    if importlib.util.find_spec("ray") is None:
        return "ray is not installed: pip install 'wanma[ray]'"
    return None


@functools.cache
def ray_client(address: str) -> RayClient:
    """Return the client of this process for a Ray cluster."""
    return RayClient(address)


class RayClient:
    """Client of one Ray cluster; it connects with the first question.

    Args:
        address: `HOST:PORT` of the head node, or 'auto'.
    """

    def __init__(self, address: str) -> None:
        self._address, self._lock = address, threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self.head = ""
        """Address of the head node, once connected."""

    def ask(self, operation: str, *, seconds: float = QUERY_SECONDS, **values: Any) -> Any:
        """Return the answer of the bridge to a question; see `bridge.OPERATIONS`.

        Raises:
            WanmaError: Ray is not installed, refuses, or does not answer within the deadline.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._connect()
            return self._exchange({"operation": operation, **values}, seconds)

    def _connect(self) -> None:
        if (reason := missing_ray()) is not None:
            raise WanmaError(reason, "", EXIT_USAGE)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "wanma.engines.ray.bridge"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if name not in ("RAY_JOB_ID",)},
        )
        atexit.register(self._end)
        try:
            self.head = self._exchange({"operation": "connect", "address": self._address}, CONNECT_SECONDS)
        except WanmaError:
            self._end()
            raise

    def _exchange(self, request: dict[str, Any], seconds: float) -> Any:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        deadline, text = time.monotonic() + seconds, b""
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            while not text.endswith(b"\n"):
                left = max(deadline - time.monotonic(), 0)
                if not select.select([self._process.stdout], [], [], left)[0]:
                    raise TimeoutError
                if not (block := os.read(self._process.stdout.fileno(), 1 << 16)):
                    raise BrokenPipeError
                text += block
        except (TimeoutError, BrokenPipeError) as error:
            self._end()
            what = "ended the connection" if isinstance(error, BrokenPipeError) else "gave no answer"
            raise WanmaError(
                f"the Ray cluster at {self.head or self._address} {what} within {seconds:.0f} s",
                "see `ray status` there, and try again later",
            ) from error
        reply = json.loads(text)
        if "error" in reply:
            raise WanmaError(reply["error"], reply["hint"])
        return reply["value"]

    def _end(self) -> None:
        """End the process of the bridge."""
        process, self._process = self._process, None
        atexit.unregister(self._end)
        if process is not None:
            process.kill()
            process.communicate()
