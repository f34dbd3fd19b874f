"""Processes of a run's servers on the hosts of its nodes, and one connection to each.

Its methods are called by one thread at a time; it knows no table.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from wanma.job.errors import WanmaError
from wanma.parameter_server.frames import (
    OUTAGE_RETRY_SECONDS,
    OUTAGE_SECONDS,
    Connection,
    PeerLostError,
    ask_peers,
)
from wanma.parameter_server.server_host import Host, ServerProcess, wait_for_end

Launch = tuple[Host, ServerProcess | None]
"""Host of a server, and the process that it has started; None: its node is lost."""


@dataclass
class _Server:
    process: ServerProcess
    connection: Connection


class ServerProcesses:
    """Server processes by number, spread over the nodes in turn.

    Args:
        secret: secret of the run.
        nodes: number of nodes.
        on_end: called by a thread of its own when a process has ended, whoever has ended it.
    """

    def __init__(self, secret: bytes, nodes: int, on_end: Callable[[ServerProcess], None]) -> None:
        self._secret, self._nodes, self._on_end = secret, nodes, on_end
        self._servers: dict[int, _Server] = {}
        self._hosts: dict[int, Host] = {}
        """By node the host of its servers; a lost node has none."""

    def close(self) -> None:
        """Close the connections; hosts end their servers themselves."""
        for server in self._servers.values():
            server.connection.close()

    @property
    def running(self) -> dict[int, ServerProcess]:
        """Processes by number."""
        return {number: server.process for number, server in self._servers.items()}

    def node_of(self, number: int) -> int:
        return number % self._nodes

    def has_node_of(self, number: int) -> bool:
        """Return whether the node of a server is there."""
        return self.node_of(number) in self._hosts

    def take_hosts(self, hosts: Mapping[int, Host]) -> set[int]:
        """Take the hosts of all nodes.

        Returns:
            servers that were lost with a node for which another host stands now.
        """
        lost: set[int] = set()
        for node, host in hosts.items():
            if (old := self._hosts.get(node)) is not None and old.endpoint != host.endpoint:
                lost |= {number for number in self._servers if self.node_of(number) == node}
            self._hosts[node] = host
        return lost

    def launch(self, numbers: Iterable[int]) -> dict[int, Launch]:
        """Start processes on nodes that are there, at once, for `take`; others may ask meanwhile."""
        found = {n: self._hosts.get(self.node_of(n)) for n in numbers}
        hosts = {n: host for n, host in found.items() if host is not None}

        def start(number: int) -> ServerProcess | None:
            try:
                return hosts[number].start(number)
            except PeerLostError:
                return None

        with ThreadPoolExecutor(max(len(hosts), 1)) as pool:
            processes = list(pool.map(start, hosts))
        return {n: (host, process) for (n, host), process in zip(hosts.items(), processes, strict=True)}

    def start_missing(self, count: int) -> set[int]:
        """Start those of the servers 0 to `count` - 1 that are missing; return as `take`."""
        return self.take(self.launch(number for number in range(count) if number not in self._servers))

    def take(self, launched: Mapping[int, Launch]) -> set[int]:
        """Connect to launched processes, and watch them.

        Returns:
            servers that ended at once.
        """
        ended: set[int] = set()
        for number, (host, process) in launched.items():
            if process is None:  # its node is lost
                self._hosts.pop(self.node_of(number), None)
                continue
            try:
                self._servers[number] = _Server(process, Connection(process.endpoint, self._secret))
            except PeerLostError:
                ended.add(number)
                continue
            threading.Thread(
                target=self._watch, args=(process, host), daemon=True, name="wanma-servers-watch"
            ).start()
        return ended

    def end(self, number: int) -> str:
        """End a server, and return how its process ended, in words."""
        server = self._servers.pop(number, None)
        if server is not None:
            server.connection.close()
        node = self.node_of(number)
        if node not in self._hosts:
            return f"with node {node}"
        try:
            return self._hosts[node].end(number)
        except PeerLostError as error:
            del self._hosts[node]
            return f"with node {node} ({error})"

    def is_alive(self, number: int) -> bool:
        """Return whether a server accepts a connection."""
        try:
            Connection(self._servers[number].process.endpoint, self._secret, 0.0).close()
        except (PeerLostError, WanmaError, KeyError):  # another program may listen there by now
            return False
        return True

    def ask(
        self, numbers: Sequence[int], message: dict[str, Any]
    ) -> tuple[dict[int, dict[str, Any]], set[int]]:
        """Send a request to servers at once, and again while living servers do not reach each other.

        Returns:
            (answers, lost servers); if servers are lost, others may have answered.

        Raises:
            WanmaError: a server refuses, or the network between servers stays away.
        """
        deadline = time.monotonic() + OUTAGE_SECONDS
        requests = [(number, message, ()) for number in numbers]
        while True:
            frames, lost, refusal = ask_peers(lambda number: self._servers[number].connection, requests)
            if refusal is not None and not lost:  # else a loss explains it, and the request is repeated
                raise refusal
            answers = {number: header for number, (header, _) in frames.items()}
            unreached = {number: answer["lost"] for number, answer in answers.items() if "lost" in answer}
            lost |= {peer for peer in set(unreached.values()) if not self.is_alive(peer)}
            if lost or not unreached:
                return answers, lost
            if time.monotonic() > deadline:
                number, peer = min(unreached.items())
                raise WanmaError(
                    f"parameter server {number} has not reached parameter server {peer} for "
                    f"{OUTAGE_SECONDS:.0f} s, while the coordinator reaches both",
                    "restore the network between their nodes; the same command continues from the newest "
                    "checkpoint",
                )
            time.sleep(OUTAGE_RETRY_SECONDS)

    def _watch(self, process: ServerProcess, host: Host) -> None:
        with contextlib.suppress(WanmaError):  # the host obeys another group, as `end` will be told
            wait_for_end(host, process)
        self._on_end(process)
