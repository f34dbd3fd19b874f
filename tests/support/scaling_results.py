"""Results of one job on several numbers of ranks, with throughputs as given."""

from __future__ import annotations

from typing import Any

from wanma.bench.results.result import BenchmarkResult, ContenderRecord
from wanma.job.cluster import Cluster
from wanma.job.plan.plan import Plan


def record(
    ranks: int,
    batch: int = 8,
    device: str = "cuda",
    threads: int = 2,
    cluster: Cluster | None = None,
    **settings: Any,
) -> ContenderRecord:
    plan = Plan(dp_replicate=ranks, micro_batch=1, device=device, threads_per_rank=threads)
    content = {"plan": plan.to_json(), "forecast": {"step": {"seconds": batch / (100 * ranks**0.9)}}}
    return ContenderRecord(
        f"{ranks}",
        "job",
        {"parallel.dp_replicate": str(ranks), "train.global_batch": str(batch), **settings},
        job=f"[train]\nglobal_batch = {batch}\n",
        plan=content if cluster is None else {**content, "cluster": cluster.to_json()},
    )


def result(records: list[ContenderRecord], rates: list[float]) -> BenchmarkResult:
    values = {
        one.name: {"samples_per_second": {number: rate * (1 + 0.001 * number) for number in range(6)}}
        for one, rate in zip(records, rates, strict=True)
    }
    return BenchmarkResult(
        "id", "scaling", "Scaling", "2026-11-26T00:00:00+00:00", tuple(records), values=values
    )
