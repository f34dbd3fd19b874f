"""Cost of a save for the training step, and its bandwidth beside the disk's: wanma and its peers.

    python benchmarks/checkpoint/run.py [--megabytes 400] [--ranks 2] [--rounds 7] [--folder DIR]

In every round each contender saves the same state once, one after the other, in an order that turns from
round to round: wanma, `torch.distributed.checkpoint.save` and `.async_save`, and, as the disk's limit, a
plain write and fsync of the same bytes by each rank. The stall is the time for which the slowest rank cannot
go on training; the bandwidth counts from the call until all is durable. Prints a Markdown table of medians
with what is needed to repeat it.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file: find `benchmarks`

from benchmarks.common import machine

from wanma.checkpoint.save.checkpointer import Checkpointer

LAYERS = 12
COPIES = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
Sample = tuple[float, float]
"""Seconds of stall, and seconds until all data are durable; of the slowest rank."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=400, help="size of the state, all ranks together")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to save; default: the current folder"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(
        prefix="benchmark-checkpoint-", dir=options.folder or Path.cwd()
    ) as folder:
        arguments = (options.ranks, options.megabytes, options.rounds, Path(folder))
        spawn(measure, arguments, nprocs=options.ranks)


def measure(rank: int, ranks: int, megabytes: int, rounds: int, folder: Path) -> None:
    warnings.filterwarnings("ignore", module="torch")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    state = make_state(ranks, megabytes)
    size = ranks * sum(tensor.to_local().nbytes for tensor in state.values())
    contenders = make_contenders(rank, ranks, state, folder)
    samples: dict[str, list[Sample]] = {name: [] for name in contenders}
    loads: list[float] = []
    names = list(contenders)
    for number in range(-1, rounds):  # the round before the first allocates buffers and is not counted
        turn = max(number, 0) % len(names)
        for name in names[turn:] + names[:turn]:
            if rank == 0:
                os.sync()
            dist.barrier()
            sample = slowest(contenders[name](number + 1))
            dist.barrier()
            if number >= 0:
                samples[name].append(sample)
        loads.append(os.getloadavg()[0])
    if rank == 0:
        print(table(samples, size, ranks, rounds, statistics.median(loads)))
    dist.barrier()
    dist.destroy_process_group()


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
        "wanma": wanma,
        "torch.distributed.checkpoint.save": synchronous,
        "torch.distributed.checkpoint.async_save": asynchronous,
        "write + fsync of the same bytes": disk,
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


def table(samples: dict[str, list[Sample]], size: int, ranks: int, rounds: int, load: float) -> str:
    middle = {
        name: (statistics.median(stall for stall, _ in each), statistics.median(total for _, total in each))
        for name, each in samples.items()
    }
    sync_stall = middle["torch.distributed.checkpoint.save"][0]
    limit = middle["write + fsync of the same bytes"][1]
    lines = [
        "| | stall, s | of a synchronous save | durable after, s | GB/s | of the disk's limit |",
        "|---|---|---|---|---|---|",
    ]
    for name, (stall, durable) in middle.items():
        blocked = "– | –" if name.startswith("write") else f"{stall:.3f} | {stall / sync_stall:.2f}"
        speed = f"{durable:.3f} | {size / durable / 1e9:.2f} | {limit / durable:.2f}"
        lines.append(f"| {name} | {blocked} | {speed} |")
    command = shlex.join(["python", *sys.argv])
    return "\n".join(
        [
            *lines,
            "",
            f"{size / 1e9:.2f} GB of state, {ranks} ranks, medians of {rounds} alternating rounds.",
            f"`{command}`",
            f"{machine()}; load average {load:.1f}; torch {torch.__version__}, "
            f"Python {platform.python_version()}; {datetime.date.today().isoformat()}",
        ]
    )


if __name__ == "__main__":
    main()
