"""Seconds that a sum of gradients takes in each way of `parallel.compression`, and the bytes that it sends.

    torchrun --nproc-per-node 2 benchmarks/parallel/compression.py --megabytes 64
    torchrun --nnodes 2 --nproc-per-node 1 ... benchmarks/parallel/compression.py    # over a real link

Methods take turns, so that what else the machine does meets all of them alike; the table has medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))  # run as a file

from wanma.collectives.compression.methods import KEEP_ERRORS, method_of
from wanma.collectives.compression.pieces import Memory, Piece
from wanma.collectives.compression.power_sgd import first_q
from wanma.job.sections import Compression

SIDE = 1024
"""Of the matrices that the gradients are."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=64, help="of whole gradients in fp32")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--rank", type=int, default=4)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    count = max((options.megabytes << 20) // (4 * SIDE * SIDE), 1)
    gradients = [torch.randn(1, SIDE * SIDE) for _ in range(count)]
    kinds: tuple[Compression, ...] = get_args(Compression)
    memories = {kind: [_memory(kind, number, options.rank) for number in range(count)] for kind in kinds}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    sent = dict.fromkeys(kinds, 0)
    for _ in range(options.rounds + 1):
        for kind in kinds:
            method = method_of(kind, options.share)
            pieces = [
                Piece(gradient.clone(), None, SIDE, memory)
                for gradient, memory in zip(gradients, memories[kind], strict=True)
            ]
            dist.barrier()
            began = time.perf_counter()
            sent[kind] = method.all_reduce(pieces, group)
            seconds[kind].append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        print(f"{count * SIDE * SIDE * 4 / 1e6:.0f} MB of gradients, {dist.get_world_size()} ranks, Gloo")
        for kind in kinds:
            median = statistics.median(seconds[kind][1:])
            print(f"{kind:9} {median * 1000:8.1f} ms  {sent[kind] / 1e6:8.2f} MB sent by each rank")
    dist.destroy_process_group()


def _memory(kind: Compression, number: int, rank: int) -> Memory | None:
    if kind not in KEEP_ERRORS:
        return None
    q = first_q(str(number), SIDE, rank, seed=1) if kind == "powersgd" else None
    return Memory(torch.zeros(1, SIDE * SIDE), q)


if __name__ == "__main__":
    main()
