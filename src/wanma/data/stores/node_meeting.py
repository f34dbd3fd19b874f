"""Meeting of nodes in a common folder: each knows that the others see the files that it writes.

    FOLDER/node-I    locked by node I as long as it works; its content is "met" once it has seen all nodes

The kernel drops the lock of a process that dies, so a file without a lock says nothing. A node that was
killed comes again under its number.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from wanma.data.stores.file_locks import exclusive_lock, is_locked
from wanma.job.errors import WanmaError

_POLL_SECONDS = 0.1
_OWN_LOCK_SECONDS = 2.0
"""Wait for the lock of this node, which others take for an instant to see if it is held."""
_LEAVE_SECONDS = 60.0
"""Longest wait of a node at its end for others that are here and have not seen it yet."""
_SILENT_SECONDS = 3.0
"""Wait after which the user hears of it."""
_MET = b"met"


@contextmanager
def meet_nodes(
    folder: Path,
    nodes: int,
    node: int,
    wait_seconds: float,
    on_wait: Callable[[Sequence[int]], None] | None = None,
) -> Iterator[None]:
    """Wait until all nodes are here; they see this one during the block.

    Args:
        folder: folder that all nodes have in common; it is made if it is missing.
        nodes: number of nodes.
        node: number of this node in [0, nodes).
        wait_seconds: time in which the other nodes come.
        on_wait: called once with the nodes that are waited for.

    Raises:
        WanmaError: a node does not come, or another process has this node's number.
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(_path(folder, node), _OWN_LOCK_SECONDS) as descriptor:
        if descriptor is None:
            raise WanmaError(
                f"another process prepares the same data as node {node}",
                "give each node its own number with --node, from 0",
            )
        os.ftruncate(descriptor, 0)
        others = [number for number in range(nodes) if number != node]
        _await_nodes(folder, others, node, wait_seconds, on_wait)
        os.pwrite(descriptor, _MET, 0)
        try:
            yield
        finally:
            _await_farewell(folder, others)


def _await_nodes(
    folder: Path,
    others: Sequence[int],
    node: int,
    wait_seconds: float,
    on_wait: Callable[[Sequence[int]], None] | None,
) -> None:
    start = time.monotonic()
    while missing := [number for number in others if not is_locked(_path(folder, number))]:
        waited = time.monotonic() - start
        if on_wait is not None and waited >= _SILENT_SECONDS:
            on_wait(missing)
            on_wait = None
        if waited >= wait_seconds:
            shown = ", ".join(map(str, missing))
            raise WanmaError(
                f"node {node} has waited {wait_seconds:.0f} s for node {shown} in {folder}: it was not "
                "started, or the nodes do not share this folder, or they see other files or another job",
                "start the same command on all nodes, with data.cache in storage that they share; where they "
                "share none, prepare on each by itself: leave out --nodes",
            )
        time.sleep(_POLL_SECONDS)


def _await_farewell(folder: Path, others: Sequence[int]) -> None:
    """Stay until every other node has seen this one, or is gone."""
    deadline = time.monotonic() + _LEAVE_SECONDS
    while time.monotonic() < deadline:
        paths = [_path(folder, number) for number in others]
        if all(path.read_bytes() == _MET or not is_locked(path) for path in paths):
            return
        time.sleep(_POLL_SECONDS)


def _path(folder: Path, node: int) -> Path:
    return folder / f"node-{node}"
