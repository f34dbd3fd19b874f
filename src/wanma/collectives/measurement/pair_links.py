"""Measurement of single links: latency and bandwidth of each pair of ranks alone, and of the bisection.

All ranks of the group call each function; ranks outside the pair return at once. Where measurements of
collectives show what a ring gives, these show which link of it is slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from wanma.collectives.measurement.microbenchmark import measure_average, measure_slowest

LATENCY_BYTES = 8
"""Size of the message whose time is the latency."""
MESSAGES_IN_FLIGHT = 2
"""Messages of a stream that are under way at once, so that one is sent while the last is acknowledged."""


def measure_pair_latency(
    first: int, second: int, group: dist.ProcessGroup, device: torch.device, target_seconds: float = 0.02
) -> float:
    """Measure half the round trip of a message of `LATENCY_BYTES` between two ranks.

    Args:
        first: rank in the group that sends first.
        second: rank in the group that answers.
        group: process group of both.
        device: device of the messages.
        target_seconds: time to fill with round trips.

    Returns:
        Seconds on the two ranks; 0 on others.
    """
    if group.rank() not in (first, second):
        return 0.0
    peer = dist.get_global_rank(group, second if group.rank() == first else first)
    message = torch.zeros(LATENCY_BYTES, dtype=torch.uint8, device=device)

    def round_trip() -> None:
        if group.rank() == first:
            dist.send(message, peer, group)
            dist.recv(message, peer, group)
        else:
            dist.recv(message, peer, group)
            dist.send(message, peer, group)

    repeats = _agreed_repeats(round_trip, first, peer, group, device, target_seconds)
    return measure_average(round_trip, repeats, device) / 2


def measure_pair_stream(
    source: int,
    target: int,
    buffer_bytes: int,
    group: dist.ProcessGroup,
    device: torch.device,
    target_seconds: float = 0.02,
) -> float:
    """Measure a message of a stream in one direction, while nothing else is sent.

    Args:
        source: rank in the group that sends.
        target: rank in the group that receives.
        buffer_bytes: size of a message.
        group: process group of both.
        device: device of the messages.
        target_seconds: time to fill with messages.

    Returns:
        Seconds of one message on the two ranks; 0 on others.
    """
    if group.rank() not in (source, target):
        return 0.0
    is_source = group.rank() == source
    peer = dist.get_global_rank(group, target if is_source else source)
    buffers = [torch.zeros(buffer_bytes, dtype=torch.uint8, device=device) for _ in range(MESSAGES_IN_FLIGHT)]
    receipt = torch.zeros(1, dtype=torch.uint8, device=device)

    def stream(messages: int) -> None:
        move = dist.isend if is_source else dist.irecv
        pending: list[dist.Work] = []
        for number in range(messages):
            if len(pending) == MESSAGES_IN_FLIGHT:
                pending.pop(0).wait()
            work = move(buffers[number % MESSAGES_IN_FLIGHT], peer, group)
            assert work is not None  # both ranks are in the group
            pending.append(work)
        for work in pending:
            work.wait()
        # A send may return before its message has arrived.
        if is_source:
            dist.recv(receipt, peer, group)
        else:
            dist.send(receipt, peer, group)

    repeats = _agreed_repeats(lambda: stream(1), source, peer, group, device, target_seconds)
    return measure_average(lambda: stream(repeats), 1, device) / repeats


def measure_bisection(
    buffer_bytes: int, group: dist.ProcessGroup, device: torch.device, target_seconds: float = 0.05
) -> float:
    """Measure messages between the halves of the ranks: each with its partner, both ways, all at once.

    Rank i of the first half exchanges with rank i of the second; of an odd number the last rank has none.

    Returns:
        Seconds of one exchange on the slowest rank; the same on all ranks.
    """
    half, rank = group.size() // 2, group.rank()
    if rank >= 2 * half:
        return measure_slowest(lambda: None, group, device, target_seconds)
    peer = dist.get_global_rank(group, (rank + half) % (2 * half))
    buffer, received = (torch.zeros(buffer_bytes, dtype=torch.uint8, device=device) for _ in range(2))

    def exchange() -> None:
        operations = [
            dist.P2POp(dist.isend, buffer, peer, group),
            dist.P2POp(dist.irecv, received, peer, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return measure_slowest(exchange, group, device, target_seconds)


def _agreed_repeats(
    run: Callable[[], object],
    leader: int,
    peer: int,
    group: dist.ProcessGroup,
    device: torch.device,
    target_seconds: float,
) -> int:
    """Return how often two ranks run something to fill a time; the leader decides, after two runs."""
    run()  # connections are made at their first use
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    repeats = torch.tensor(
        [max(1, int(target_seconds / max(time.perf_counter() - start, 1e-9)))], device=device
    )
    if group.rank() == leader:
        dist.send(repeats, peer, group)
    else:
        dist.recv(repeats, peer, group)
    return int(repeats)
