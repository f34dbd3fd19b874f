"""Server processes of a run: started, filled, watched, and replaced with the content of the other holder.

All changes of the table are made here, one at a time, and between updates.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wanma.job.errors import WanmaError
from wanma.job.run.parameter_servers import ServedParameter
from wanma.parameter_server.frames import Connection, PeerLostError
from wanma.parameter_server.table import ServerTable

_ANSWER_SECONDS = 120.0
"""Longest wait for a server's answer; a server that takes longer counts as lost, and is killed."""
_MAX_LOSSES_WITHOUT_UPDATE = 5
"""Losses of servers without an update between, after which the run ends."""


class ServersLostError(WanmaError):
    """Loss of all copies of a shard."""


@dataclass
class _Server:
    process: subprocess.Popen[str]
    connection: Connection


class ServerGroup:
    """Group of the server processes of a run.

    Args:
        count: number of servers.
        replicas: holders of each shard.
        secret: secret of the run.
        logs: folder for the output of the servers.
        threads: threads of each server.
        show: function that shows the user a text of a level.
        host: address on which servers listen.
    """

    def __init__(
        self,
        count: int,
        replicas: int,
        secret: bytes,
        logs: Path,
        show: Callable[[str, str], None],
        *,
        threads: int = 1,
        host: str = "127.0.0.1",
    ) -> None:
        self._replicas, self._secret, self._logs, self._threads = replicas, secret, logs, threads
        self._show, self._host = show, host
        self._lock = threading.RLock()
        self._servers: dict[int, _Server] = {}
        self._optimizer: dict[str, Any] = {}
        self._update = 0
        self._losses = 0
        self._is_closed = False
        self.table: ServerTable | None = None
        """Table of the filled servers; None: they hold nothing."""
        self.on_loss: Callable[[WanmaError], None] = lambda _: None
        """Called when all copies of a shard are lost while no request notices it."""
        processes = {number: self._start_process(number) for number in range(count)}
        for number, process in processes.items():
            self._connect(number, process)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for server in self._servers.values():
                server.connection.close()
                server.process.kill()
        for server in self._servers.values():
            server.process.wait()

    @property
    def process_ids(self) -> dict[int, int]:
        """Process of each server."""
        return {number: server.process.pid for number, server in self._servers.items()}

    def fill(
        self, parameters: Sequence[ServedParameter], optimizer: dict[str, Any], update: int
    ) -> ServerTable:
        """Give the servers empty shards of parameters, which the chief fills.

        Raises:
            ServersLostError: a server is lost meanwhile.
        """
        with self._lock:
            self._optimizer, self._update = optimizer, update
            version = 1 if self.table is None else self.table.version + 1
            self.table = ServerTable.build(version, parameters, self._endpoints(), self._replicas)
            self._ask(list(self._servers), self._message("reset", table=self.table.to_json()))
            return self.table

    def note_update(self) -> None:
        """Note that an update was applied: losses before it do not count together with later ones."""
        self._losses = 0

    def ask_primaries(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a request to all primaries at once and return the answers; lost servers are replaced.

        Raises:
            ServersLostError: all copies of a shard are lost.
        """
        with self._lock:
            self._update = message["update"]
            while True:
                assert self.table is not None
                before = self.table.version
                answers = self._ask(self.table.primaries(), message)
                for answer in answers:
                    if "lost" in answer and self.table.version == before:
                        self._replace(answer["lost"])
                if self.table.version == before:
                    return answers

    def replace_if_lost(self, number: int, version: int) -> None:
        """Replace a server that a worker could not reach, unless that has been done since its table.

        Raises:
            ServersLostError: all copies of a shard are lost.
        """
        with self._lock:
            if self.table is not None and self.table.version == version and number in self._servers:
                self._replace(number)

    def resize(self, count: int, update: int) -> None:
        """Move row ranges so that `count` servers hold all; called between two updates."""
        with self._lock:
            if self.table is None:
                raise WanmaError("parameter servers hold nothing yet: they cannot be resized")
            self._update, old = update, self.table
            for number in range(len(self._servers), count):
                self._connect(number, self._start_process(number))
            endpoints = {number: end for number, end in self._endpoints().items() if number < count}
            self._move(ServerTable.build(old.version + 1, old.parameters, endpoints, self._replicas))
            for number in [number for number in self._servers if number >= count]:
                server = self._servers.pop(number)
                server.connection.close()
                server.process.kill()
                server.process.wait()

    # ---------------------------------------------------------------- inside

    def _replace(self, lost: int) -> None:
        """Replace a lost server: the other holders go on, and the new process copies from them."""
        server = self._servers[lost]
        server.connection.close()
        server.process.kill()
        code = server.process.wait()
        cause = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        self._losses += 1
        remaining = None if self.table is None else self.table.without(lost)
        was_filled = self.table is not None
        if self._losses > _MAX_LOSSES_WITHOUT_UPDATE:
            raise ServersLostError(
                f"parameter server {lost} ended {cause}, the {self._losses}th loss without an update between",
                f"read {self._log(lost)}",
            )
        self._connect(lost, self._start_process(lost))
        if remaining is None:
            self.table = None
            if was_filled:
                raise ServersLostError(
                    f"parameter server {lost} ended {cause}, and no other holds its shards",
                    "the same command continues from the newest checkpoint; servers.replicas = 2 keeps each "
                    f"shard on two servers; its log is {self._log(lost)}",
                )
            return
        self._show(f"parameter server {lost} ended {cause}; another takes its place", "warning")
        self.table = remaining
        self._ask([number for number in self._servers if number != lost], self._activation(remaining))
        endpoints = self._endpoints()
        self._move(ServerTable.build(remaining.version + 1, remaining.parameters, endpoints, self._replicas))

    def _move(self, table: ServerTable) -> None:
        """Let all servers of a table collect their shards, and put it to use."""
        assert self.table is not None
        # Sources know where every server is, the new ones included.
        source = replace(self.table, endpoints={**self.table.endpoints, **table.endpoints})
        self._ask(
            sorted(table.endpoints), self._message("prepare", table=table.to_json(), source=source.to_json())
        )
        self.table = table
        self._ask(sorted(table.endpoints), self._activation(table))

    def _activation(self, table: ServerTable) -> dict[str, Any]:
        return self._message("activate", table=table.to_json())

    def _message(self, operation: str, **fields: Any) -> dict[str, Any]:
        return {"op": operation, "optimizer": self._optimizer, "update": self._update, **fields}

    def _ask(self, numbers: list[int], message: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a request to servers at once and return their answers; lost ones are replaced."""
        lost: list[int] = []
        sent: list[int] = []
        answers: list[dict[str, Any]] = []
        refusal: WanmaError | None = None
        for number in numbers:
            try:
                self._servers[number].connection.send(message, (), _ANSWER_SECONDS)
                sent.append(number)
            except PeerLostError:
                lost.append(number)
        for number in sent:
            try:
                answers.append(self._servers[number].connection.receive()[0])
            except PeerLostError:
                lost.append(number)
            except WanmaError as error:
                refusal = error
        for number in lost:
            self._replace(number)
        if refusal is not None:
            raise refusal
        return answers

    def _endpoints(self) -> dict[int, tuple[str, int]]:
        return {number: server.connection.address for number, server in self._servers.items()}

    def _log(self, number: int) -> Path:
        return self._logs / f"server-{number}.log"

    def _start_process(self, number: int) -> subprocess.Popen[str]:
        self._logs.mkdir(parents=True, exist_ok=True)
        with self._log(number).open("a") as log:
            # A session of its own: Ctrl-C is for the supervisor, which lets the workers save first.
            process = subprocess.Popen(
                [sys.executable, "-m", "wanma.parameter_server.server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": str(self._threads)},
            )
        settings = {
            "number": number,
            "secret": base64.b64encode(self._secret).decode(),
            "host": self._host,
            "threads": self._threads,
        }
        assert process.stdin is not None
        process.stdin.write(json.dumps(settings) + "\n")
        process.stdin.flush()
        return process

    def _connect(self, number: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise WanmaError(
                f"parameter server {number} did not start: it ended with exit code {process.wait()}",
                f"read {self._log(number)}",
            )
        host, port = json.loads(line)
        self._servers[number] = _Server(process, Connection((host, port), self._secret))
        threading.Thread(
            target=self._watch, args=(number, process), daemon=True, name="wanma-servers-watch"
        ).start()

    def _watch(self, number: int, process: subprocess.Popen[str]) -> None:
        """Replace a server when its process ends and nobody else has noticed."""
        process.wait()
        try:
            with self._lock:
                server = self._servers.get(number)
                if not self._is_closed and server is not None and server.process is process:
                    self._replace(number)
        except WanmaError as error:
            self.on_loss(error)
