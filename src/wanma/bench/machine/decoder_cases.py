"""Benchmark of a small decoder under the runtime's own ways to split it, on the ranks of a calibration."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.model import ModelSection
from wanma.models.model_spec import resolve_model_spec
from wanma.parallel.mesh.parallel_mesh import build_mesh
from wanma.parallel.parallelize import parallelize
from wanma.planner.calibration.framework_benchmarks import (
    BLOCKS,
    DIMENSIONS,
    SEQUENCE_LENGTH,
    benchmark_plans,
)
from wanma.planner.calibration.microbenchmarks import BenchmarkCase
from wanma.planner.calibration.round_robin import sum_over_ranks
from wanma.training.loss.cross_entropy import cross_entropy_sum


def decoder_cases(worker: WorkerContext, threads_per_core: float) -> list[BenchmarkCase]:
    """Return one benchmark case for each of `benchmark_plans`; all ranks of a process group call it.

    Args:
        threads_per_core: threads of all ranks per core of a CPU, at least 1.
    """
    return [
        BenchmarkCase(
            operator,
            (worker.world_size, BLOCKS),
            "",
            partial(_time_run, _make_micro_batch(worker, plan), threads_per_core),
        )
        for operator, plan in benchmark_plans(worker.world_size).items()
    ]


def _make_micro_batch(worker: WorkerContext, plan: Plan) -> Callable[[], object]:
    """Return a function that runs forward and backward of a micro-batch, except for once-per-step work."""
    section = ModelSection.model_validate(
        {
            "family": "decoder",
            "layers": DIMENSIONS.layers,
            "hidden": DIMENSIONS.hidden,
            "heads": DIMENSIONS.heads,
            "feed_forward": DIMENSIONS.feed_forward,
        }
    )
    spec = resolve_model_spec(
        section,
        vocabulary_size=DIMENSIONS.vocabulary,
        sequence_length=SEQUENCE_LENGTH,
        image_shape=None,
        classes=None,
    )
    grid = build_mesh(plan, worker.rank, torch.device("cpu"), worker.local_world_sizes)
    model = parallelize(spec, plan, grid, seed=0)
    model.initialize_parameters()
    assert DIMENSIONS.vocabulary is not None
    tokens = torch.arange(SEQUENCE_LENGTH).remainder(DIMENSIONS.vocabulary).view(1, SEQUENCE_LENGTH)

    def run() -> None:
        model.begin_micro_batch(is_last=False)
        cross_entropy_sum(model.module(tokens), tokens, overwrite_logits=True).backward()

    return run


def _time_run(run: Callable[[], object], threads_per_core: float, seconds: float) -> float:
    """Return the seconds of one run on this rank; all ranks run equally often, because they wait in it."""
    group = dist.group.WORLD
    assert group is not None
    ranks = group.size()
    clock = time.perf_counter if threads_per_core <= 1 else time.process_time

    def repeat(times: int) -> float:
        began = clock()
        for _ in range(times):
            run()
        return (clock() - began) * max(threads_per_core, 1.0) / times

    run()  # warm-up: the first run allocates buffers
    single_seconds = sum_over_ranks([repeat(1)], group)[0] / ranks
    return repeat(max(1, int(seconds / max(single_seconds, 1e-9))))
