"""CPU seconds of a training step against the rows of its embedding table, of three ways to hold the table.

`nn.EmbeddingBag` with dense gradients and AdamW, with sparse gradients and SparseAdam, and wanma's
`ShardedEmbedding` with its Adam, in turns in one process with one thread, on ids that follow Zipf's law:

    python benchmarks/recommender/step_cost.py --rows 100000 1000000
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import AdamW, SparseAdam

from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.train import TrainSection
from wanma.models.recommender.embedding_tables import EmbeddingTables
from wanma.parallel.embedding.sharded_embedding import shard_embeddings
from wanma.parallel.mesh.parallel_mesh import ParallelMesh, open_mesh
from wanma.training.optimizer.table_optimizer import TableOptimizer

WIDTH, BAGS, IDS_PER_BAG, ZIPF_EXPONENT = 64, 4096, 4, 1.05
RATE = 1e-3
Step = Callable[[Tensor], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    plan = Plan(embedding="row_wise", micro_batch=BAGS)
    with tempfile.TemporaryDirectory() as folder:
        worker = WorkerContext.single_process(Path(folder))
        with open_mesh(worker, plan, hang_timeout_seconds=60) as parallel_mesh:
            for rows in arguments.rows:
                print(f"{rows:>12,} rows  {measure(rows, arguments.steps, parallel_mesh)}", flush=True)


def measure(rows: int, steps: int, parallel_mesh: ParallelMesh) -> str:
    """Return the median CPU milliseconds of a step of each contender, as text."""
    contenders = {
        "EmbeddingBag, AdamW": bag_step(rows, is_sparse=False),
        "EmbeddingBag, SparseAdam": bag_step(rows, is_sparse=True),
        "ShardedEmbedding, adam": sharded_step(rows, parallel_mesh),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(steps + 2):
        ids = draw_ids(rows, number)
        for name, step in contenders.items():
            began = time.process_time()
            step(ids)
            if number >= 2:  # the first allocate state
                seconds[name].append(time.process_time() - began)
    return "  ".join(f"{name} {statistics.median(times) * 1e3:8.2f} ms" for name, times in seconds.items())


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
    with torch.device("meta"):
        tables = EmbeddingTables({"ids": rows}, WIDTH)
    (embedding,) = shard_embeddings(nn.ModuleDict({"embeddings": tables}), parallel_mesh)
    embedding.allocate(torch.device("cpu"))
    nn.init.normal_(embedding.matrix)
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


def draw_ids(rows: int, seed: int) -> Tensor:
    """Return the ids of one batch, (bags × ids,), by the inverse of Zipf's distribution function."""
    uniform = torch.rand(BAGS * IDS_PER_BAG, generator=torch.Generator().manual_seed(seed))
    power = 1 - ZIPF_EXPONENT
    ids: Tensor = ((1 + uniform * ((rows + 1) ** power - 1)) ** (1 / power)).long().clamp(1, rows) - 1
    return ids


if __name__ == "__main__":
    main()
