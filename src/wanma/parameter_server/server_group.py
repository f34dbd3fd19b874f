"""Group of a run's servers: filled, replaced, and made more or fewer, with a table of what each holds.

All changes of the table are made here, one at a time, and between requests of updates. A change that the loss
of a server interrupts is begun again from the table in use, which serves until all of the next is in place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

from wanma.job.errors import WanmaError
from wanma.job.run.parameter_servers import ServedParameter
from wanma.parameter_server.server_host import Host, ServerProcess
from wanma.parameter_server.server_processes import ServerProcesses
from wanma.parameter_server.table import ServerTable

_MAX_LOSSES_WITHOUT_UPDATE = 5
"""Losses of servers without an update between, after which the run ends."""


class ServersLostError(WanmaError):
    """Loss of all copies of a shard."""


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
        self._count, self._replicas, self._logs, self._show = count, replicas, logs, show
        self._lock = threading.RLock()
        self._processes = ServerProcesses(secret, nodes, self._on_end)
        self._optimizer: dict[str, Any] = {}
        self._update = 0
        self._version = 0
        """Version of the newest table, in use or not."""
        self._losses = 0
        self._is_closed = False
        self._changes: dict[tuple[Any, ...], futures.Future[object]] = {}
        """Changes that requests wait for, by what they are."""
        self._changes_lock = threading.Lock()
        self.is_changing = False
        """True while lost servers are replaced or row ranges move."""
        self.table: ServerTable | None = None
        """Table of the filled servers; None: they hold nothing."""
        self.on_loss: Callable[[WanmaError], None] = lambda _: None
        """Called when all copies of a shard are lost while no request notices it."""

    def close(self) -> None:
        """Close the connections; hosts end their servers themselves."""
        self.release()
        with self._lock:
            self._processes.close()

    def release(self) -> None:
        """Replace no server any more: the run has ended, and hosts end theirs."""
        self._is_closed = True

    @property
    def endpoints(self) -> dict[int, tuple[str, int]]:
        """Host and port of each server."""
        return {number: process.endpoint for number, process in self._processes.running.items()}

    def wait_for_change(self, key: tuple[Any, ...], change: Callable[[], object], seconds: float) -> bool:
        """Call methods that change the group in a thread of its own, once for all that wait with `key`.

        Returns:
            False if it takes longer: the next call with that key waits on.
        """
        with self._changes_lock:
            if (pending := self._changes.get(key)) is None:
                pending = self._changes[key] = futures.Future()
                threading.Thread(target=self._settle, args=(pending, change), daemon=True).start()
        if not futures.wait([pending], seconds).done:
            return False
        with self._changes_lock:
            if self._changes.get(key) is pending:
                del self._changes[key]
        pending.result()
        return True

    def set_hosts(self, hosts: Mapping[int, Host]) -> None:
        """Take the hosts of all nodes, and start the servers that are missing; called between two updates.

        A node that another host stands for has been lost with its servers.

        Raises:
            ServersLostError: all copies of a shard were lost; the servers are empty.
            WanmaError: a node is lost meanwhile.
        """
        with self._lock:
            self._is_closed = False
            self._converge(self._processes.take_hosts(hosts), self._count)
            if self._is_missing(self._count):
                raise WanmaError(
                    "a node is lost while its parameter servers start",
                    "the run continues when the same command runs on that node again",
                )

    def fill(
        self, parameters: Sequence[ServedParameter], optimizer: dict[str, Any], update: int
    ) -> ServerTable:
        """Give the servers empty shards of parameters, which the chief fills.

        Raises:
            ServersLostError: servers end as often as they are started.
        """
        with self._lock:
            self._optimizer, self._update = optimizer, update
            while True:
                self.table = table = self._build_table(parameters, self._count)
                message = self._message("reset", table=table.to_json())
                _, lost = self._processes.ask(sorted(table.endpoints), message)
                if not lost:
                    return table
                self.table = None
                self._converge(lost)

    def note_update(self) -> None:
        """Note that an update was applied: losses before it do not count together with later ones."""
        self._losses = 0

    def ask_primaries(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a request to all primaries at once and return the answers; lost servers are replaced.

        Raises:
            ServersLostError: all copies of a shard are lost.
            WanmaError: a server refuses, or servers do not reach each other.
        """
        with self._lock:
            self._update = message["update"]
            while True:
                answers, lost = self._processes.ask(self._require_table().primaries(), message)
                if not lost:
                    return list(answers.values())
                self._converge(lost)

    def replace_if_lost(self, number: int, version: int) -> None:
        """Replace a server that a worker did not reach, if it is lost and the worker's table is in use.

        Args:
            number: number of the server.
            version: version of the worker's table.

        Raises:
            ServersLostError: all copies of a shard are lost.
        """
        with self._lock:
            is_used = self.table is not None and self.table.version == version
            if is_used and not self._processes.is_alive(number):
                self._converge({number})

    def launch(self, count: int) -> None:
        """Start the processes of servers that are to join, which hold nothing yet; updates go on meanwhile.

        Raises:
            WanmaError: a process does not start.
        """
        launched = self._processes.launch(range(len(self._require_table().holders), count))
        with self._lock:
            self._processes.take(launched)

    def resize(self, count: int, update: int) -> bool:
        """Move row ranges so that `count` servers hold all; called between two updates.

        Returns:
            False if a node is lost: ranges move when it is back.

        Raises:
            ServersLostError: all copies of a shard are lost.
            WanmaError: it fails, and the servers before go on.
        """
        with self._lock:
            self._require_table()
            self._count, self._update = count, update
            try:
                self._converge(count=count)
            except ServersLostError:
                raise
            except WanmaError:
                self._count = len(self._require_table().holders)
                self._converge(self._activate())
                raise
            return not self._is_missing(count)

    # ---------------------------------------------------------------- inside

    def _converge(self, lost: Collection[int] = (), count: int | None = None) -> None:
        """Replace lost servers, and move row ranges until the servers 0 to `count` - 1 hold all.

        While a node is lost, the other holders of its shards go on alone.

        Args:
            lost: servers that have ended or do not answer.
            count: number of servers, which may change between two updates; default: as in the table.

        Raises:
            ServersLostError: all copies of a shard are lost; the servers are empty.
        """
        self.is_changing = True
        try:
            self._replace_and_move(lost, count)
        finally:
            self.is_changing = False

    def _replace_and_move(self, lost: Collection[int], count: int | None) -> None:
        """Change the table as `_converge` says."""
        if count is None:
            count = self._count if self.table is None else len(self.table.holders)
        pending = set(lost)
        failure: ServersLostError | None = None
        while True:
            if pending:
                failure = self._drop(pending) or failure
                pending = self._activate()
                continue
            if pending := self._processes.start_missing(count):
                continue
            if failure is not None:
                raise failure
            if self.table is None or self._is_missing(count):
                return
            target = self._build_table(self.table.parameters, count)
            if (target.holders, target.endpoints) == (self.table.holders, self.table.endpoints):
                break
            pending = self._move(target)
        for number in [number for number in self._processes.running if number >= count]:
            self._processes.end(number)

    def _drop(self, lost: Collection[int]) -> ServersLostError | None:
        """Take lost servers out of the table.

        Returns:
            an error if a shard has no other holder; there is no table then.

        Raises:
            ServersLostError: servers end as often as they are started.
        """
        causes = {number: self._processes.end(number) for number in sorted(lost)}
        first, cause = next(iter(causes.items()))
        if any(self._processes.has_node_of(number) for number in lost):
            self._losses += 1
        if self._losses > _MAX_LOSSES_WITHOUT_UPDATE:
            self.table = None
            raise ServersLostError(
                f"parameter server {first} ended {cause}, the {self._losses}th loss without an update "
                "between",
                f"read {self._log(first)}",
            )
        if self.table is None:
            return None
        self.table = self.table.without(lost, self._next_version())
        if self.table is None:
            return ServersLostError(
                f"parameter server {first} ended {cause}, and no other holds its shards",
                "the same command continues from the newest checkpoint; servers.replicas = 2 keeps each "
                f"shard on two servers; its log is {self._log(first)}",
            )
        for number, cause in causes.items():
            is_node_there = self._processes.has_node_of(number)
            successor = "another takes its place" if is_node_there else "the others go on without it"
            self._show(f"parameter server {number} ended {cause}; {successor}", "warning")
        return None

    def _move(self, target: ServerTable) -> set[int]:
        """Let the servers of a table collect their shards while the others serve, and put it to use.

        Returns:
            lost servers. If there are any before it is in use, the table before stays.
        """
        tables = {"table": target.to_json(), "source": self._require_table().to_json()}
        waiting = sorted(target.endpoints)
        while waiting:
            answers, lost = self._processes.ask(waiting, self._message("prepare", **tables))
            if lost:
                return lost
            waiting = [number for number, answer in answers.items() if not answer["is_done"]]
        self.table = target
        return self._activate()

    def _activate(self) -> set[int]:
        """Let all servers use the table, and return those that are lost."""
        if self.table is None:
            return set()
        message = self._message("activate", table=self.table.to_json())
        return self._processes.ask(list(self._processes.running), message)[1]

    def _message(self, operation: str, **fields: Any) -> dict[str, Any]:
        return {"op": operation, "optimizer": self._optimizer, "update": self._update, **fields}

    def _build_table(self, parameters: Sequence[ServedParameter], count: int) -> ServerTable:
        """Return a new table over those of the servers 0 to `count` - 1 that are there."""
        endpoints = {number: end for number, end in self.endpoints.items() if number < count}
        nodes = {number: self._processes.node_of(number) for number in endpoints}
        return ServerTable.build(self._next_version(), parameters, endpoints, self._replicas, nodes)

    def _is_missing(self, count: int) -> bool:
        """Return whether one of the servers 0 to `count` - 1 is missing."""
        return not self._processes.running.keys() >= set(range(count))

    def _next_version(self) -> int:
        self._version += 1
        return self._version

    def _require_table(self) -> ServerTable:
        if self.table is None:
            raise WanmaError(
                "the parameter servers hold nothing", "the same command continues from the newest checkpoint"
            )
        return self.table

    def _log(self, number: int) -> Path:
        return self._logs / f"server-{number}.log"

    def _on_end(self, process: ServerProcess) -> None:
        """Replace a server whose process has ended if nobody else has noticed."""
        try:
            with self._lock:
                if not self._is_closed and self._processes.running.get(process.number) == process:
                    self._converge({process.number})
        except WanmaError as error:
            if self.table is None or not isinstance(error, ServersLostError):  # else filled again already
                self.on_loss(error)

    def _settle(self, pending: futures.Future[object], change: Callable[[], object]) -> None:
        try:
            with self._lock:
                pending.set_result(change())
        except BaseException as error:
            pending.set_exception(error)
