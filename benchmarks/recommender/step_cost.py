"""CPU seconds of a training step against the rows of its embedding table, of three ways to hold the table.

`nn.EmbeddingBag` with dense gradients and AdamW, with sparse gradients and SparseAdam, and wanma's
`ShardedEmbedding` with its Adam, in turns in one process with one thread, on ids that follow Zipf's law:

    python benchmarks/recommender/step_cost.py --rows 100000 1000000
    python benchmarks/recommender/step_cost.py --rows 1000000 16000000 --same-ids --lookup

With `--lookup` the bytes per second of lookups alone, read and written, in a table of wider rows, beside
those of the copy that `wanma bench machine` measures. The process has the allocator of wanma's ranks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, SparseAdam

from wanma.elastic.workers.environment import TUNED_MALLOC_ENVIRONMENT
from wanma.hardware.measurement.run_times import CPU_COPY_BYTES, copy_run
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.train import TrainSection
from wanma.models.recommender.embedding_tables import EmbeddingTables
from wanma.parallel.embedding.sharded_embedding import ShardedEmbedding, shard_embeddings
from wanma.parallel.mesh.parallel_mesh import ParallelMesh, open_mesh
from wanma.training.optimizer.table_optimizer import TableOptimizer

WIDTH, BAGS, IDS_PER_BAG, ZIPF_EXPONENT = 64, 4096, 4, 1.05
LOOKUP_WIDTH = 128
"""Width of the rows of a lookup: that of MLPerf's DLRM-DCNv2."""
SCATTER = 2_654_435_761  # odd and larger than any table: Knuth's multiplicative hashing
RATE = 1e-3
Step = Callable[[Tensor], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--same-ids", action="store_true", help="equally many different ids in all tables, scattered"
    )
    parser.add_argument("--lookup", action="store_true", help="measure lookups instead of steps")
    arguments = parser.parse_args()
    if not TUNED_MALLOC_ENVIRONMENT.items() <= os.environ.items():  # it is read when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **TUNED_MALLOC_ENVIRONMENT})
    measured = measure_lookup if arguments.lookup else measure
    torch.set_num_threads(1)
    plan = Plan(embedding="row_wise", micro_batch=BAGS)
    with tempfile.TemporaryDirectory() as folder:
        worker = WorkerContext.single_process(Path(folder))
        with open_mesh(worker, plan, hang_timeout_seconds=60) as parallel_mesh:
            for rows in arguments.rows:
                drawn, factor = (min(arguments.rows), SCATTER) if arguments.same_ids else (rows, 1)
                batches = [draw_ids(drawn, number) * factor % rows for number in range(arguments.steps + 2)]
                print(f"{rows:>12,} rows  {measured(rows, batches, parallel_mesh)}", flush=True)


def measure(rows: int, batches: Sequence[Tensor], parallel_mesh: ParallelMesh) -> str:
    """Return the median CPU milliseconds of a step of each contender, as text."""
    contenders = {
        "EmbeddingBag, AdamW": bag_step(rows, is_sparse=False),
        "EmbeddingBag, SparseAdam": bag_step(rows, is_sparse=True),
        "ShardedEmbedding, adam": sharded_step(rows, parallel_mesh),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number, ids in enumerate(batches):
        for name, step in contenders.items():
            began = time.process_time()
            step(ids)
            if number >= 2:  # the first allocate state
                seconds[name].append(time.process_time() - began)
    return "  ".join(f"{name} {statistics.median(times) * 1e3:8.2f} ms" for name, times in seconds.items())


@torch.no_grad()
def measure_lookup(rows: int, batches: Sequence[Tensor], parallel_mesh: ParallelMesh) -> str:
    """Return the median rates of lookups and of a copy in GB/s, with their share of the copy's, as text."""
    tables, embedding = sharded_tables(rows, LOOKUP_WIDTH, parallel_mesh)
    offsets = torch.arange(BAGS) * IDS_PER_BAG
    copy = copy_run(torch.device("cpu"), CPU_COPY_BYTES)
    size = 4 * LOOKUP_WIDTH * BAGS * (IDS_PER_BAG + 1)  # read, and written as sums
    runs: dict[str, tuple[Callable[[Tensor], object], int]] = {
        "copy": (lambda _: copy(), 2 * CPU_COPY_BYTES),
        "embedding_bag": (lambda ids: F.embedding_bag(ids, embedding.matrix, offsets, mode="sum"), size),
        "ShardedEmbedding": (lambda ids: tables({"ids": ids, "ids.offsets": offsets})(), size),
    }
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for ids in batches:
        for name, (run, moved) in runs.items():
            began = time.perf_counter()
            run(ids)
            rates[name].append(moved / (time.perf_counter() - began))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return "  ".join(
        f"{name} {rate / 1e9:.2f} GB/s ({rate / medians['copy']:.2f})" for name, rate in medians.items()
    )


def bag_step(rows: int, *, is_sparse: bool) -> Step:
    """Return a step of torch's own module and optimizer."""
    table = nn.EmbeddingBag(rows, WIDTH, mode="sum", sparse=is_sparse)
    parameters = list(table.parameters())
    optimizer = SparseAdam(parameters, lr=RATE) if is_sparse else AdamW(parameters, lr=RATE, fused=True)
    offsets = torch.arange(BAGS) * IDS_PER_BAG

    def step(ids: Tensor) -> None:
        table(ids, offsets).square().sum().backward()
        optimizer.step()  # type: ignore[no-untyped-call]  # SparseAdam's
        optimizer.zero_grad()

    return step


def sharded_step(rows: int, parallel_mesh: ParallelMesh) -> Step:
    """Return a step of tables that data ranks share, of one rank."""
    tables, embedding = sharded_tables(rows, WIDTH, parallel_mesh)
    optimizer = TableOptimizer(embedding, TrainSection(embedding_optimizer="adam"))
    features = {"ids.offsets": torch.arange(BAGS) * IDS_PER_BAG}
    count = 0

    def step(ids: Tensor) -> None:
        nonlocal count
        count += 1
        (vectors,) = tables({**features, "ids": ids})()
        vectors.square().sum().backward()
        embedding.finalize_gradients(1)
        optimizer.step(RATE, count)
        embedding.reset_gradients()

    return step


def sharded_tables(
    rows: int, width: int, parallel_mesh: ParallelMesh
) -> tuple[EmbeddingTables, ShardedEmbedding]:
    """Return one table that data ranks share, and what holds its rows."""
    with torch.device("meta"):
        tables = EmbeddingTables({"ids": rows}, width)
    (embedding,) = shard_embeddings(nn.ModuleDict({"embeddings": tables}), parallel_mesh)
    embedding.allocate(torch.device("cpu"))
    nn.init.normal_(embedding.matrix)
    return tables, embedding


def draw_ids(rows: int, seed: int) -> Tensor:
    """Return the ids of one batch, (bags × ids,), by the inverse of Zipf's distribution function."""
    uniform = torch.rand(BAGS * IDS_PER_BAG, generator=torch.Generator().manual_seed(seed))
    power = 1 - ZIPF_EXPONENT
    ids: Tensor = ((1 + uniform * ((rows + 1) ** power - 1)) ** (1 / power)).long().clamp(1, rows) - 1
    return ids


if __name__ == "__main__":
    main()
