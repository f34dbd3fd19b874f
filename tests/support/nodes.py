"""Several machines of one run, for tests on one."""

from __future__ import annotations

import socket

from support.command import Desk, Ran, Running
from support.supervisors import wait_for_listener

SHARDED = (
    "text.toml",
    "train.steps=12",
    "checkpoint.in_memory_every_steps=1",
    "parallel.dp_replicate=1",
    "parallel.dp_shard=2",
    "parallel.shard=parameters",
    "cluster.nodes=2",
)


class Machines:
    """The commands of one run on several machines, which are this one.

    Args:
        words: after `wanma train`: the job file, and overrides.
    """

    def __init__(self, desk: Desk, name: str, *words: str, **environment: str) -> None:
        self._desk, self._name, self._words = desk, name, words
        self._environment = environment
        self.training = desk.training(name)
        self.running: dict[int, Running] = {}
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self._place = f"127.0.0.1:{sock.getsockname()[1]}"

    def start(self, node: int, before: tuple[str, ...] = ()) -> None:
        self.running[node] = self.command(node, before)
        wait_for_listener(self._place)  # the first to come hosts the coordinator

    def command(self, node: int, before: tuple[str, ...] = ()) -> Running:
        """Start the command of one machine; `before`: what it is started by."""
        return self._desk.start(
            "train",
            *self._words,
            f"cluster.rendezvous={self._place}",
            f"cluster.node_rank={node}",
            "--run-dir",
            self._name,
            before=before,
            **self._environment,
        )

    def lose(self, node: int) -> None:
        """All its processes and all its memory are gone at once."""
        self.running[node].kill_all()
        self.running.pop(node).end()

    def end(self) -> list[Ran]:
        return [self.running[node].end() for node in sorted(self.running)]
