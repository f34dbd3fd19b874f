"""Host of parameter servers: the part of a node that starts, watches and ends their processes.

The group of a run's servers lies in one process; it reaches the hosts of other nodes by `RemoteHost`.
"""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from wanma.job.errors import WanmaError
from wanma.parameter_server.frames import Buffers, Connection, FrameServer, PeerLostError

_START_SECONDS = 120.0
"""Longest wait for the first line of a process, which it writes when it listens."""
_END_SECONDS = 20.0
_WAIT_SECONDS = 15.0
"""Longest wait of a request for the end of a process, before it is asked again."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals by which a run is stopped. Batch systems, such as Slurm, send them to every process of a job."""


@dataclass(frozen=True)
class ServerProcess:
    """Process of a server."""

    number: int
    """Number of the server."""
    endpoint: tuple[str, int]
    process_id: int


class Host(Protocol):
    """Host of servers, here or on another node.

    Its methods raise `PeerLostError` if the node is lost.
    """

    @property
    def endpoint(self) -> tuple[str, int] | None:
        """Endpoint at which other nodes reach the host; None: none does."""

    def start(self, number: int) -> ServerProcess:
        """Start a server; an earlier process of that number ends."""

    def end(self, number: int) -> str:
        """End a server, and return how its process ended, in words."""

    def wait(self, process: ServerProcess) -> bool:
        """Wait until a process has ended; False: it goes on, and the wait is to be repeated."""


class ServerHost:
    """Host of the servers of this node.

    Args:
        secret: secret of the run.
        logs: folder for the output of the servers.
        address: address on which servers listen.
        is_remote: true if groups on other nodes may use it.
    """

    def __init__(
        self,
        secret: bytes,
        logs: Path,
        *,
        address: str = "127.0.0.1",
        is_remote: bool = False,
    ) -> None:
        self._secret, self._logs, self._address = secret, logs, address
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._group = (0, "")
        """Newest start of the run's workers, and the group that it uses."""
        self._is_closed = False
        self._lock = threading.Lock()
        self._frames: FrameServer | None = None
        if is_remote:
            self._frames = FrameServer(self._handle, secret, address, name="the host of the servers")

    @property
    def endpoint(self) -> tuple[str, int] | None:
        return None if self._frames is None else self._frames.address

    def close(self) -> None:
        if self._frames is not None:
            self._frames.close()
        with self._lock:
            self._is_closed = True
            processes, self._processes = self._processes, {}
        _kill(processes)

    def start(self, number: int) -> ServerProcess:
        self.end(number)
        try:
            process = self._open(number)
        except OSError as error:
            raise WanmaError(
                f"parameter server {number} did not start: {error}", "make room on that machine"
            ) from error
        with self._lock:
            if self._is_closed:
                process.kill()
            else:
                self._processes[number] = process
        assert process.stdout is not None
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        is_silent = not poll.poll(1000 * _START_SECONDS)
        if is_silent:
            process.kill()
        line = process.stdout.readline()
        if is_silent or not line:
            code = process.wait()
            silence = f"it was silent for {_START_SECONDS:g} s"
            cause = silence if is_silent else f"it ended with exit code {code}"
            raise WanmaError(f"parameter server {number} did not start: {cause}", f"read {self._log(number)}")
        host, port = json.loads(line)
        return ServerProcess(number, (host, port), process.pid)

    def end(self, number: int) -> str:
        with self._lock:
            process = self._processes.pop(number, None)
        if process is None:
            return "with its host"
        process.kill()
        code = process.wait()
        return f"by signal {-code}" if code < 0 else f"with exit code {code}"

    def wait(self, process: ServerProcess, seconds: float | None = None) -> bool:
        with self._lock:
            own = self._processes.get(process.number)
        if own is None or own.pid != process.process_id:
            return True
        try:
            own.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _handle(self, header: dict[str, Any], _buffers: list[bytearray]) -> tuple[dict[str, Any], Buffers]:
        self._follow(header["generation"], header["group"])
        operation, number = header["op"], header["number"]
        if operation == "start":
            process = self.start(number)
            return {"endpoint": process.endpoint, "process_id": process.process_id}, ()
        if operation == "end":
            return {"cause": self.end(number)}, ()
        if operation == "wait":
            process = ServerProcess(number, ("", 0), header["process_id"])
            return {"has_ended": self.wait(process, _WAIT_SECONDS)}, ()
        raise WanmaError(f"the host of the parameter servers has no operation {operation}")

    def _follow(self, generation: int, group: str) -> None:
        """Follow the group of the newest start; the servers of another end."""
        with self._lock:
            newest, followed = self._group
            if group != followed and generation <= newest:
                raise WanmaError("a group of parameter servers is of an earlier start of the run")
            self._group = (max(newest, generation), group)
            old = {}
            if group != followed:
                old, self._processes = self._processes, {}
        _kill(old)

    def _log(self, number: int) -> Path:
        return self._logs / f"server-{number}.log"

    def _open(self, number: int) -> subprocess.Popen[str]:
        self._logs.mkdir(parents=True, exist_ok=True)
        # Stop signals are for the supervisor alone, which lets the workers save first.
        with self._log(number).open("a") as log, _stop_signals_blocked():
            process = subprocess.Popen(
                [sys.executable, "-m", "wanma.parameter_server.server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        settings = {
            "number": number,
            "secret": base64.b64encode(self._secret).decode(),
            "host": self._address,
        }
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: so has its output, which tells
            process.stdin.write(json.dumps(settings) + "\n")
            process.stdin.flush()
        return process


@dataclass(frozen=True)
class RemoteHost:
    """Host of the servers of another node, as a group reaches it: a connection for each request."""

    endpoint: tuple[str, int]
    secret: bytes
    group: str
    """Unique name of the group."""
    generation: int
    """Number of the start of the workers that named the host."""

    def start(self, number: int) -> ServerProcess:
        answer = self._ask("start", number, _START_SECONDS + _END_SECONDS)
        host, port = answer["endpoint"]
        return ServerProcess(number, (host, port), answer["process_id"])

    def end(self, number: int) -> str:
        cause: str = self._ask("end", number, _END_SECONDS)["cause"]
        return cause

    def wait(self, process: ServerProcess) -> bool:
        seconds = _WAIT_SECONDS + _END_SECONDS
        answer = self._ask("wait", process.number, seconds, process_id=process.process_id)
        return bool(answer["has_ended"])

    def _ask(self, operation: str, number: int, seconds: float, **fields: Any) -> dict[str, Any]:
        connection = Connection(self.endpoint, self.secret)
        try:
            message = {"op": operation, "number": number, "group": self.group, "generation": self.generation}
            return connection.request({**message, **fields}, (), seconds)[0]
        finally:
            connection.close()


def wait_for_end(host: Host, process: ServerProcess) -> None:
    """Wait until a process has ended, or its host is lost for longer than a connection takes."""
    failures = 0
    while failures < 2:
        try:
            if host.wait(process):
                return
            failures = 0
        except PeerLostError:
            failures += 1


@contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """Block stop signals in this thread; in a process that it starts meanwhile they stay blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _kill(processes: dict[int, subprocess.Popen[str]]) -> None:
    for process in processes.values():
        process.kill()
    for process in processes.values():
        process.wait()
