"""One round on one node: saves of the same state by each contender, in turn.

    python -m benchmarks.checkpoint.measure --output FILE --folder DIR [--megabytes 400] [--ranks 2]

Each contender saves as often as there are contenders, at each place in their order once, after a save that
does not count: it allocates buffers. Writes JSON: for each contender its seconds of stall and seconds until
all is durable, of the slowest rank, medians of the saves.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.spawn import spawn

from benchmarks.checkpoint.report import ASYNCHRONOUS, DISK, SYNCHRONOUS, WANMA
from wanma.checkpoint.save.checkpointer import Checkpointer

LAYERS = 12
COPIES = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
Sample = tuple[float, float]
"""Seconds of stall, and seconds until all data are durable; of the slowest rank."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=400, help="size of the state, all ranks together")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, required=True, help="folder of the checkpoints")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="benchmark-checkpoint-", dir=options.folder) as folder:
        arguments = (options.ranks, options.megabytes, Path(folder), options.output)
        spawn(measure, arguments, nprocs=options.ranks)


def measure(rank: int, ranks: int, megabytes: int, folder: Path, output: Path) -> None:
    warnings.filterwarnings("ignore", module="torch")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    state = make_state(ranks, megabytes)
    size = ranks * sum(tensor.to_local().nbytes for tensor in state.values())
    contenders = make_contenders(rank, ranks, state, folder)
    samples: dict[str, list[Sample]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(-1, len(names)):
        turn = max(number, 0)
        for name in names[turn:] + names[:turn]:
            if rank == 0:
                os.sync()
            dist.barrier()
            sample = slowest(contenders[name](number + 1))
            dist.barrier()
            if number >= 0:
                samples[name].append(sample)
    if rank == 0:
        output.write_text(json.dumps({"bytes": size, "seconds": medians(samples)}))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # threads that a peer's library leaves may abort the process while it ends


def medians(samples: dict[str, list[Sample]]) -> dict[str, dict[str, float]]:
    return {
        name: {
            "stall": statistics.median(stall for stall, _ in each),
            "durable": statistics.median(durable for _, durable in each),
        }
        for name, each in samples.items()
    }


def make_state(ranks: int, megabytes: int) -> dict[str, DTensor]:
    """Return fp32 weights and two AdamW moments of `LAYERS` layers, sharded by rows over all ranks."""
    mesh = init_device_mesh("cpu", (ranks,))
    width = 1024
    rows = megabytes * 1_000_000 // (4 * width * LAYERS * len(COPIES) * ranks)
    return {
        f"{copy}.layers.{layer}.weight": DTensor.from_local(torch.randn(rows, width), mesh, [Shard(0)])
        for copy in COPIES
        for layer in range(LAYERS)
    }


def make_contenders(
    rank: int, ranks: int, state: dict[str, DTensor], folder: Path
) -> dict[str, Callable[[int], Sample]]:
    ours = Checkpointer(folder / "wanma", rank, ranks, keep=1, keep_best=False)
    raw = memoryview(
        torch.cat([tensor.to_local().view(-1) for tensor in state.values()]).numpy().view("u1").data
    )

    def wanma(number: int) -> Sample:
        ticket = ours.save(number, state, {"step": number})
        (result,) = ours.wait()
        if result.error is not None:
            raise result.error
        return ticket.stall_seconds, ticket.stall_seconds + result.write_seconds + result.commit_seconds

    def synchronous(_: int) -> Sample:
        target = fresh(folder / "sync", rank)
        began = time.perf_counter()
        save(state, checkpoint_id=target)
        seconds = time.perf_counter() - began
        return seconds, seconds

    def asynchronous(_: int) -> Sample:
        target = fresh(folder / "async", rank)
        began = time.perf_counter()
        future = async_save(state, checkpoint_id=target)
        stall = time.perf_counter() - began
        (future.upload_completion if isinstance(future, AsyncSaveResponse) else future).result()
        return stall, time.perf_counter() - began

    def disk(_: int) -> Sample:
        target = fresh(folder / "raw", rank) / f"{rank}"
        began = time.perf_counter()
        with target.open("wb", buffering=0) as file:
            written = 0
            while written < len(raw):
                written += file.write(raw[written:])
            os.fsync(file.fileno())
        seconds = time.perf_counter() - began
        return seconds, seconds

    return {
        WANMA: wanma,
        SYNCHRONOUS: synchronous,
        ASYNCHRONOUS: asynchronous,
        DISK: disk,
    }


def fresh(path: Path, rank: int) -> Path:
    """Create an empty folder, the same for all ranks."""
    if rank == 0:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
    dist.barrier()
    return path


def slowest(sample: Sample) -> Sample:
    times = torch.tensor(sample, dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    stall, durable = times.tolist()
    return stall, durable


if __name__ == "__main__":
    main()
