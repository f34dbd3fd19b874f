"""A small decoder under the runtime's own ways to split it, timed on the ranks of a calibration."""

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
    """One for each of `plans`; all ranks call it, in a process group that they have joined.

    Args:
        shared: as of `microbenchmarks.measure`.
    """
    return [
        Case(operator, (worker.world_size, BLOCKS), "", partial(_seconds, _micro_batch(worker, plan), shared))
        for operator, plan in plans(worker.world_size).items()
    ]


def _micro_batch(worker: Worker, plan: Plan) -> Callable[[], object]:
    """Forward and backward of one that is not its step's last: what is done once a step is left out."""
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
    """Of one run, on this rank; all ranks run as often, for they wait for each other inside."""
    everyone = dist.group.WORLD
    assert everyone is not None
    ranks = everyone.size()
    clock = time.perf_counter if shared <= 1 else time.process_time

    def repeat(times: int) -> float:
        began = clock()
        for _ in range(times):
            run()
        return (clock() - began) * max(shared, 1.0) / times

    run()  # the first one makes what later ones use
    once = added_up([repeat(1)], everyone)[0] / ranks
    return repeat(max(1, int(seconds / max(once, 1e-9))))
