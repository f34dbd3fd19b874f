"""Group of a run's servers: started, filled, watched, and replaced with the content of the other holder.

All changes of the table are made here, one at a time, and between updates.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wanma.job.errors import WanmaError
from wanma.job.run.parameter_servers import ServedParameter
from wanma.parameter_server.frames import Connection, PeerLostError
from wanma.parameter_server.server_host import Host, ServerProcess, wait_for_end
from wanma.parameter_server.table import ServerTable

_ANSWER_SECONDS = 120.0
"""Longest wait for a server's answer; a server that takes longer counts as lost, and is killed."""
_MAX_LOSSES_WITHOUT_UPDATE = 5
"""Losses of servers without an update between, after which the run ends."""


class ServersLostError(WanmaError):
    """Loss of all copies of a shard."""


@dataclass
class _Server:
    process: ServerProcess
    connection: Connection


class ServerGroup:
    """Group of the server processes of a run.

    Args:
        count: number of servers.
        replicas: holders of each shard.
        secret: secret of the run.
        logs: folder with the output of the servers.
        show: function that shows the user a text of a level.
        nodes: number of nodes, over which the servers are spread in turn.
    """

    def __init__(
        self,
        count: int,
        replicas: int,
        secret: bytes,
        logs: Path,
        show: Callable[[str, str], None],
        nodes: int = 1,
    ) -> None:
        self._count, self._replicas, self._secret, self._logs = count, replicas, secret, logs
        self._show, self._nodes = show, nodes
        self._hosts: dict[int, Host] = {}
        """By node the host of its servers; a lost node has none."""
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

    def close(self) -> None:
        """Close the connections; hosts end their servers themselves."""
        self.release()
        with self._lock:
            for server in self._servers.values():
                server.connection.close()

    def release(self) -> None:
        """Replace no server any more: the run has ended, and hosts end theirs."""
        self._is_closed = True

    @property
    def process_ids(self) -> dict[int, int]:
        """Process of each server."""
        return {number: server.process.process_id for number, server in self._servers.items()}

    @property
    def endpoints(self) -> dict[int, tuple[str, int]]:
        """Host and port of each server."""
        return {number: server.process.endpoint for number, server in self._servers.items()}

    def set_hosts(self, hosts: Mapping[int, Host]) -> None:
        """Take the hosts of all nodes, and start the servers that are missing.

        A node that another host stands for has been lost with its servers.

        Raises:
            ServersLostError: all copies of a shard were lost; the servers are empty.
            WanmaError: a node is lost meanwhile.
        """
        lost: ServersLostError | None = None
        with self._lock:
            self._is_closed = False
            for node, host in hosts.items():
                if (old := self._hosts.get(node)) is not None and old.endpoint != host.endpoint:
                    del self._hosts[node]
                    for number in [one for one in self._servers if self._node_of(one) == node]:
                        if number in self._servers:
                            try:
                                self._replace(number)
                            except ServersLostError as error:
                                lost = error
                self._hosts[node] = host
            missing = [number for number in range(self._count) if number not in self._servers]
            try:
                if missing:
                    self._start(missing)
            except PeerLostError as error:
                raise WanmaError(f"a node is lost while its parameter servers start: {error}") from error
            if missing and self.table is not None:
                self._move(self._next_table())
        if lost is not None:
            raise lost

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
            self.table = self._build_table(version, parameters, self.endpoints)
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
            self._update, old, self._count = update, self.table, count
            if added := [number for number in range(count) if number not in self._servers]:
                self._start(added)
            endpoints = {number: end for number, end in self.endpoints.items() if number < count}
            self._move(self._build_table(old.version + 1, old.parameters, endpoints))
            for number in [number for number in self._servers if number >= count]:
                self._servers.pop(number).connection.close()
                self._hosts[self._node_of(number)].end(number)

    # ---------------------------------------------------------------- inside

    def _replace(self, lost: int) -> None:
        """Replace a lost server: the other holders go on, and the new process copies from them.

        The servers of a lost node are replaced when it is back.
        """
        self._servers.pop(lost).connection.close()
        node = self._node_of(lost)
        try:
            cause = self._hosts[node].end(lost) if node in self._hosts else f"with node {node}"
        except PeerLostError as error:
            del self._hosts[node]
            cause = f"with node {node} ({error})"
        if node in self._hosts:
            self._losses += 1
        remaining = None if self.table is None else self.table.without(lost)
        was_filled = self.table is not None
        if self._losses > _MAX_LOSSES_WITHOUT_UPDATE:
            raise ServersLostError(
                f"parameter server {lost} ended {cause}, the {self._losses}th loss without an update between",
                f"read {self._log(lost)}",
            )
        is_started = self._try_start(lost)
        if remaining is None:
            self.table = None
            if was_filled:
                raise ServersLostError(
                    f"parameter server {lost} ended {cause}, and no other holds its shards",
                    "the same command continues from the newest checkpoint; servers.replicas = 2 keeps each "
                    f"shard on two servers; its log is {self._log(lost)}",
                )
            return
        successor = "another takes its place" if is_started else "the others go on without it"
        self._show(f"parameter server {lost} ended {cause}; {successor}", "warning")
        self.table = remaining
        self._ask([number for number in self._servers if number != lost], self._activation(remaining))
        if is_started:
            self._move(self._next_table())

    def _try_start(self, number: int) -> bool:
        """Start a server again; False: its node is lost."""
        node = self._node_of(number)
        if node not in self._hosts:
            return False
        try:
            self._start([number])
        except PeerLostError:
            del self._hosts[node]
        return number in self._servers

    def _move(self, table: ServerTable) -> None:
        """Let all servers of a table collect their shards, and put it to use."""
        assert self.table is not None
        before = self.table.version
        # Sources know where every server is, the new ones included.
        source = replace(self.table, endpoints={**self.table.endpoints, **table.endpoints})
        self._ask(
            sorted(table.endpoints), self._message("prepare", table=table.to_json(), source=source.to_json())
        )
        if self.table.version != before:  # a server was lost meanwhile, and its replacement has moved all
            return
        self.table = table
        self._ask(sorted(table.endpoints), self._activation(table))

    def _activation(self, table: ServerTable) -> dict[str, Any]:
        return self._message("activate", table=table.to_json())

    def _message(self, operation: str, **fields: Any) -> dict[str, Any]:
        return {"op": operation, "optimizer": self._optimizer, "update": self._update, **fields}

    def _ask(self, numbers: list[int], message: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a request to servers at once and return their answers; lost ones are replaced."""
        lost: list[tuple[int, _Server]] = []
        sent: list[tuple[int, _Server]] = []
        answers: list[dict[str, Any]] = []
        refusal: WanmaError | None = None
        for number, server in [(number, self._servers[number]) for number in numbers]:
            try:
                server.connection.send(message, (), _ANSWER_SECONDS)
                sent.append((number, server))
            except PeerLostError:
                lost.append((number, server))
        for number, server in sent:
            try:
                answers.append(server.connection.receive()[0])
            except PeerLostError:
                lost.append((number, server))
            except WanmaError as error:
                refusal = error
        for number, server in lost:
            if self._servers.get(number) is server:  # else it was replaced together with another
                self._replace(number)
        if refusal is not None:
            raise refusal
        return answers

    def _node_of(self, number: int) -> int:
        return number % self._nodes

    def _build_table(
        self, version: int, parameters: Sequence[ServedParameter], endpoints: Mapping[int, tuple[str, int]]
    ) -> ServerTable:
        nodes = {number: self._node_of(number) for number in endpoints}
        return ServerTable.build(version, parameters, endpoints, self._replicas, nodes)

    def _next_table(self) -> ServerTable:
        """Return the table after the present one, over all servers that there are."""
        assert self.table is not None
        return self._build_table(self.table.version + 1, self.table.parameters, self.endpoints)

    def _log(self, number: int) -> Path:
        return self._logs / f"server-{number}.log"

    def _start(self, numbers: Sequence[int]) -> None:
        """Start servers at once on the nodes that they belong to.

        Raises:
            PeerLostError: one of the nodes is lost.
        """
        with ThreadPoolExecutor(len(numbers)) as pool:
            started = list(pool.map(lambda number: self._hosts[self._node_of(number)].start(number), numbers))
        for process in started:
            server = _Server(process, Connection(process.endpoint, self._secret))
            self._servers[process.number] = server
            host = self._hosts[self._node_of(process.number)]
            threading.Thread(
                target=self._watch, args=(server, host), daemon=True, name="wanma-servers-watch"
            ).start()

    def _watch(self, server: _Server, host: Host) -> None:
        """Replace a server when its process ends and nobody else has noticed."""
        number = server.process.number
        try:
            wait_for_end(host, server.process)
            with self._lock:
                if not self._is_closed and self._servers.get(number) is server:
                    self._replace(number)
        except WanmaError as error:
            self.on_loss(error)
