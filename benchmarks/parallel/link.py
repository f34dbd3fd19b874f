"""Seconds of messages between ranks on this node, for the theory of context parallelism.

The script is started by torchrun; `context.py` gives the sizes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

WARMUP, REPETITIONS = 3, 15


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--result", type=Path, required=True)
    for name in ("ring", "ring-gradients", "exchange", "reduce"):
        parser.add_argument(f"--{name}", type=int, required=True, metavar="BYTES")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    seconds = {
        "ring": measure(pass_on, options.ring),
        "ring_gradients": measure(pass_on, options.ring_gradients),
        "exchange": measure(exchange, options.exchange),
        "reduce": measure(dist.all_reduce, options.reduce),
    }
    if dist.get_rank() == 0:
        options.result.write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def measure(communicate: Callable[[torch.Tensor], object], size: int) -> float:
    """Return the median seconds of one call with a tensor of `size` bytes."""
    tensor = torch.zeros(size // 4)
    times = []
    for number in range(WARMUP + REPETITIONS):
        dist.barrier()
        began = time.perf_counter()
        communicate(tensor)
        if number >= WARMUP:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def pass_on(tensor: torch.Tensor) -> None:
    """Send `tensor` to the next rank, and receive as much from the previous one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(tensor)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, received, (rank - 1) % ranks),
        ]
    )
    for work in works:
        work.wait()


def exchange(tensor: torch.Tensor) -> None:
    """Send a part of `tensor` to each rank."""
    dist.all_to_all_single(torch.empty_like(tensor), tensor)


if __name__ == "__main__":
    main()
