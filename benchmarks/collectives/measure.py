"""One round on one node: a collective over Gloo and over shared memory, in turns, beside a plain copy.

    python -m benchmarks.collectives.measure all_reduce --ranks 2 --mebibytes 0.0625 1 16 --output FILE

Writes JSON: for each size the seconds of each contender, of the slowest rank. All are calls of
`torch.distributed`, by one thread of each rank, with tensors of fp32 that were written to before.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from wanma.collectives.shared_memory.backend import (
    SharedMemoryOptions,
    as_shared_memory_group,
    register_backend,
)
from wanma.parallel.mesh.backend_selection import load_collectives_library

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
IN_PLACE = ("all_reduce", "all_gather", "reduce_scatter")
"""Collectives that read other ranks' tensors in place, if the group has allocated them."""
BLOCK_SECONDS = 0.05
"""Seconds of a contender's turn."""
TURNS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("collective", choices=COLLECTIVES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mebibytes", type=float, nargs="+", default=[1.0])
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wanma-bench-") as folder:
        arguments = (options.ranks, options.collective, tuple(options.mebibytes), folder, str(options.output))
        spawn(measure, arguments, nprocs=options.ranks)


def measure(
    rank: int, ranks: int, collective: str, sizes: tuple[float, ...], folder: str, output: str
) -> None:
    torch.set_num_threads(1)
    found = load_collectives_library()
    if found.path is None:
        raise SystemExit(f"error: there is nothing to compare: {found.failure_reason}")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    gloo = dist.group.WORLD
    shared = dist.new_group(
        backend=register_backend(SharedMemoryOptions(found.path, is_required=True, local_world_size=ranks))
    )
    assert gloo is not None
    seconds: dict[str, dict[str, float]] = {}
    for size in sizes:
        elements = math.ceil(size * 2**20 / 4 / ranks) * ranks
        contenders = {
            "gloo": collective_run(collective, elements, gloo),
            "staged": collective_run(collective, elements, shared),
        }
        if collective in IN_PLACE:
            contenders["in_place"] = collective_run(collective, elements, shared, in_place=True)
        source, target = torch.ones(elements), torch.zeros(elements)
        contenders["copy"] = lambda source=source, target=target: target.copy_(source)  # type: ignore[misc]
        seconds[f"{size:g}"] = in_turns(contenders, gloo)
    if rank == 0:
        Path(output).write_text(json.dumps(seconds))
    dist.destroy_process_group()


def in_turns(contenders: dict[str, Callable[[], object]], gloo: dist.ProcessGroup) -> dict[str, float]:
    """Return the seconds of one call of each contender: the median of its turns, of the slowest rank."""
    repeats = {}
    for name, run in contenders.items():
        run()  # connections and pages are made at the first use
        repeats[name] = max(1, min(int(BLOCK_SECONDS / _slowest(_timed(run, 1, gloo), gloo)), 1000))
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(TURNS):
        for name, run in contenders.items():
            taken[name].append(_slowest(_timed(run, repeats[name], gloo), gloo))
    return {name: statistics.median(each) for name, each in taken.items()}


def _timed(run: Callable[[], object], repeats: int, gloo: dist.ProcessGroup) -> float:
    dist.barrier(gloo)
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    return max((time.perf_counter() - began) / repeats, 1e-9)


def _slowest(seconds: float, gloo: dist.ProcessGroup) -> float:
    longest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=gloo)
    return float(longest)


def collective_run(
    collective: str,
    elements: int,
    group: dist.ProcessGroup,
    *,
    in_place: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Callable[[], object]:
    """Return a call of the collective on zeros, which stay zeros however often they are added."""
    ranks, me = group.size(), group.rank()
    shared = as_shared_memory_group(group) if in_place else None
    whole = torch.zeros(elements, dtype=dtype)
    if shared is not None:
        whole = shared.allocate_tensor(elements, dtype).zero_()
    part = whole.chunk(ranks)[me]
    if not in_place or collective != "all_gather":
        part = part.clone()
    if collective == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if collective == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group)
    if collective == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
    if collective == "broadcast":
        return lambda: dist.broadcast(whole, 0, group=group)
    received = torch.zeros_like(whole)
    return lambda: dist.all_to_all_single(received, whole, group=group)


if __name__ == "__main__":
    main()
