"""Seconds of a training step with an embedding table on disk, in a memory cgroup, beside one in memory.

The table is `--times` as large as the memory of the cgroup, half of which holds its rows. Both contenders
train the same network with `rowwise_adagrad` on the same ids, which follow Zipf's law and are scattered over
the table, each in a process of its own; they take turns. It needs the right to create a cgroup, and memory
for the other table:

    python benchmarks/recommender/disk_table.py --memory-gib 1 --times 8 --folder /fast/disk
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from step_cost import BAGS, IDS_PER_BAG, SCATTER, WIDTH, ZIPF_EXPONENT
from torch import Tensor, nn

from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.train import TrainSection
from wanma.models.recommender.embedding_tables import EmbeddingTables
from wanma.parallel.embedding.sharded_embedding import ShardedEmbedding, shard_embeddings
from wanma.parallel.memory.disk_pool import DiskPool
from wanma.parallel.mesh.parallel_mesh import open_mesh
from wanma.training.optimizer.table_optimizer import TableOptimizer

RATE, HIDDEN, FILL_ROWS = 1e-2, 512, 1 << 17
RECORD_BYTES = 4 * (WIDTH + 1)
CGROUPS = Path("/sys/fs/cgroup")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory-gib", type=float, default=1.0, help="memory limit of the cgroup")
    parser.add_argument("--times", type=float, default=8.0, help="size of the table over that limit")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="folder for the table"
    )
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40, help="steps of a turn")
    parser.add_argument("--warm-up", type=int, default=400, help="steps before the first turn")
    parser.add_argument("--contender", choices=("memory", "disk"), help=argparse.SUPPRESS)
    parser.add_argument("--processes-file", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender is not None:
        contend(arguments)
    else:
        compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    """Run both contenders in turns, and print the seconds of a step of each and their ratio."""
    with memory_cgroup(int(arguments.memory_gib * 2**30)) as processes_file:
        contenders = {
            name: subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], "--contender", name, *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for name, options in (("memory", ()), ("disk", ("--processes-file", str(processes_file))))
        }
        try:
            for steps in (arguments.warm_up, *[arguments.steps] * arguments.turns):
                results = {name: ask(process, steps) for name, process in contenders.items()}
                assert results["memory"]["loss"] == results["disk"]["loss"], results
                times = {name: result["seconds"] * 1e3 for name, result in results.items()}
                print(
                    f"{steps:4} steps: in memory {times['memory']:7.1f} ms, on disk {times['disk']:7.1f} ms, "
                    f"ratio {times['memory'] / times['disk']:.2f}, {results['disk']['read']:,.0f} of "
                    f"{results['disk']['used']:,.0f} rows read a step, loss {results['disk']['loss']:.6g}",
                    flush=True,
                )
        finally:
            for process in contenders.values():
                process.communicate()  # without another line it ends


def ask(process: subprocess.Popen[str], steps: int) -> dict[str, float]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{steps}\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise SystemExit(f"a contender ended with exit code {process.wait()}")
    values: dict[str, float] = json.loads(answer)
    return values


@contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path]:
    """Create a cgroup of version 1 or 2 with a memory limit; yields the file that takes process ids."""
    is_unified = (CGROUPS / "cgroup.controllers").exists()
    group = (CGROUPS if is_unified else CGROUPS / "memory") / f"wanma-benchmark-{os.getpid()}"
    group.mkdir()
    try:
        limit_file = "memory.max" if is_unified else "memory.limit_in_bytes"
        (group / limit_file).write_text(f"{limit_bytes}\n")
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


def contend(arguments: argparse.Namespace) -> None:
    """Build one contender, then run as many steps as each line of the standard input says."""
    if arguments.processes_file is not None:
        arguments.processes_file.write_text(f"{os.getpid()}\n")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    limit = int(arguments.memory_gib * 2**30)
    rows = int(limit * arguments.times) // RECORD_BYTES
    plan = Plan(embedding="row_wise", micro_batch=BAGS)
    if arguments.contender == "disk":
        plan = plan.with_changes(embedding_memory_bytes=limit // 2)
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as folder,
        DiskPool(Path(folder) / "scratch") as disk_pool,
        open_mesh(WorkerContext.single_process(Path(folder)), plan, hang_timeout_seconds=60) as parallel_mesh,
    ):
        with torch.device("meta"):
            tables = EmbeddingTables({"ids": rows}, WIDTH)
        (embedding,) = shard_embeddings(nn.ModuleDict({"embeddings": tables}), parallel_mesh, disk_pool)
        embedding.allocate(torch.device("cpu"))
        optimizer = TableOptimizer(embedding, TrainSection(embedding_optimizer="rowwise_adagrad"))
        matrix = embedding.matrix if embedding.cache is None else embedding.cache.stored_matrix
        values = torch.randn(FILL_ROWS, WIDTH) * 0.05
        for block in matrix.split(FILL_ROWS):
            block.copy_(values[: len(block)])
            disk_pool.release_pages()
        os.sync()
        run_turns(tables, embedding, optimizer, rows)


def run_turns(
    tables: EmbeddingTables, embedding: ShardedEmbedding, optimizer: TableOptimizer, rows: int
) -> None:
    network = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU())
    network.append(nn.Linear(HIDDEN, 1))
    dense_optimizer = torch.optim.SGD(network.parameters(), lr=RATE)
    offsets = torch.arange(BAGS) * IDS_PER_BAG

    def features(step: int) -> dict[str, Tensor]:
        return {"ids": draw_scattered_ids(rows, step), "ids.offsets": offsets}

    step = 0
    for line in sys.stdin:
        steps = int(line)
        batches = [features(step + number) for number in range(steps + 1)]
        began = time.perf_counter()
        times = []
        for batch, following in itertools.pairwise(batches):
            if embedding.cache is not None:
                if embedding.cache.prefetched_step != step:
                    embedding.cache.prefetch(step, embedding.used_rows([batch]))
                embedding.cache.begin_step()
                embedding.cache.prefetch(step + 1, embedding.used_rows([following]))
            (vectors,) = tables(batch)()
            loss = network(vectors).square().mean()
            loss.backward()
            embedding.finalize_gradients(1)
            step += 1
            optimizer.step(RATE, step)
            embedding.reset_gradients()
            dense_optimizer.step()
            dense_optimizer.zero_grad()
            times.append(time.perf_counter() - began)
            began = time.perf_counter()
        answer = {"seconds": statistics.mean(times), "loss": loss.item()}
        if embedding.cache is not None:
            counts = embedding.cache.pop_counts()
            answer |= {"used": counts.used / steps, "read": (counts.used - counts.in_memory) / steps}
        print(json.dumps(answer), flush=True)


def draw_scattered_ids(rows: int, seed: int) -> Tensor:
    """Return the ids of one batch, (bags × ids,): frequent ids are no neighbours on disk."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(BAGS * IDS_PER_BAG, generator=generator, dtype=torch.float64)
    power = 1 - ZIPF_EXPONENT
    places = ((1 + uniform * ((rows + 1) ** power - 1)) ** (1 / power)).long().clamp(1, rows) - 1
    ids: Tensor = places * SCATTER % rows
    return ids


if __name__ == "__main__":
    main()
