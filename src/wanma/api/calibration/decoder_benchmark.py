"""Benchmark of a small decoder under the runtime's own ways to split it, on the ranks of a calibration."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from wanma.job.plan.plan import Plan
from wanma.job.run.worker import Worker
from wanma.job.sections.job import ModelSection
from wanma.models.model_spec import model_spec
from wanma.parallel.mesh.parallel_mesh import build_grid
from wanma.parallel.parallelize import parallelize
from wanma.planner.calibration.framework_benchmarks import BLOCKS, DIMENSIONS, SEQUENCE, plans
from wanma.planner.calibration.microbenchmarks import Case
from wanma.planner.calibration.round_robin import added_up
from wanma.training.loss.cross_entropy import cross_entropy_sum


def program_cases(worker: Worker, shared: float) -> list[Case]:
    """Return one benchmark case for each of `plans`; all ranks of a process group call it.

    Args:
        shared: threads per core, as in `microbenchmarks.measure`.
    """
    return [
        Case(operator, (worker.world_size, BLOCKS), "", partial(_seconds, _micro_batch(worker, plan), shared))
        for operator, plan in plans(worker.world_size).items()
    ]


def _micro_batch(worker: Worker, plan: Plan) -> Callable[[], object]:
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
    spec = model_spec(
        section, vocabulary=DIMENSIONS.vocabulary, sequence_length=SEQUENCE, image_shape=None, classes=None
    )
    grid = build_grid(plan, worker.rank, torch.device("cpu"), worker.ranks_by_node)
    model = parallelize(spec, plan, grid, seed=0)
    model.initialize()
    assert DIMENSIONS.vocabulary is not None
    tokens = torch.arange(SEQUENCE).remainder(DIMENSIONS.vocabulary).view(1, SEQUENCE)

    def run() -> None:
        model.begin_micro_batch(last=False)
        cross_entropy_sum(model.module(tokens), tokens, spend=True).backward()

    return run


def _seconds(run: Callable[[], object], shared: float, seconds: float) -> float:
    """Return the seconds of one run on this rank; all ranks run equally often, because they wait in it."""
    everyone = dist.group.WORLD
    assert everyone is not None
    ranks = everyone.size()
    clock = time.perf_counter if shared <= 1 else time.process_time

    def repeat(times: int) -> float:
        began = clock()
        for _ in range(times):
            run()
        return (clock() - began) * max(shared, 1.0) / times

    run()  # warm-up: the first run allocates buffers
    once = added_up([repeat(1)], everyone)[0] / ranks
    return repeat(max(1, int(seconds / max(once, 1e-9))))
