"""Client of the bridge to Ray: one process for each address, whose answers have deadlines."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import subprocess
import sys
import threading
from multiprocessing.connection import wait
from typing import Any

from wanma.engines.engine import QUERY_SECONDS
from wanma.job.errors import WanmaError, missing_extra_error

CONNECT_SECONDS = 30.0
"""Deadline, in seconds, of the first answer: Ray is imported and connected before."""


def missing_ray() -> WanmaError | None:
    """Return the error if Ray cannot be imported here."""
    try:
        is_missing = importlib.util.find_spec("ray") is None
    except ValueError:  # its module was replaced by None
        is_missing = True
    return missing_extra_error("ray", "ray", "the engine 'ray'") if is_missing else None


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
            if self._process is None:
                if (error := missing_ray()) is not None:
                    raise error
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "wanma.engines.ray.bridge"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for this process
                )
                try:
                    self.head = self._exchange(CONNECT_SECONDS, operation="connect", address=self._address)
                except WanmaError:
                    self._end()
                    raise
            return self._exchange(seconds, operation=operation, **values)

    def _exchange(self, seconds: float, **request: Any) -> Any:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        line = b""
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            if wait([process.stdout.fileno()], seconds):
                line = process.stdout.readline()
        if not line:
            self._end()
            raise WanmaError(
                f"the Ray cluster at {self.head or self._address} gave no answer within {seconds:.0f} s",
                "see `ray status` there, and try again later",
            )
        reply = json.loads(line)
        if "error" in reply:
            raise WanmaError(reply["error"], reply["hint"])
        return reply["value"]

    def _end(self) -> None:
        """End the process of the bridge."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
