"""Node of each rank, and the address at which other nodes reach this one."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from wanma.hardware.discovery.network_interfaces import local_address
from wanma.job.run.worker import WorkerContext


def nodes_of_ranks(local_world_sizes: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Return the number of the node of each rank.

    Args:
        local_world_sizes: ranks of each node; empty: all are on one.
        world_size: ranks of the run.
    """
    ends = list(accumulate(local_world_sizes or [world_size]))
    return tuple(int(np.searchsorted(ends, rank, side="right")) for rank in range(world_size))


def node_address(worker: WorkerContext) -> str:
    """Return the address of this node on its route to the rendezvous store, which all nodes reach.

    Raises:
        OSError: there is no route.
    """
    for *_, address in socket.getaddrinfo(worker.store_host, None, type=socket.SOCK_STREAM):
        if found := local_address(str(address[0])):
            return found
    raise OSError(f"no route to {worker.store_host}")
