"""A rank that is built without memory asks of the network what the real one asks, and holds as much."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from support.ranks import run_ranks
from support.text import text_spec
from wanma.data.batch import Batch
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.models.model_spec import ModelSpec
from wanma.parallel.mesh.parallel_mesh import open_mesh
from wanma.parallel.parallelize import parallelize
from wanma.parallel.profiling.collective_counter import CollectiveCounter
from wanma.training.loop.dry_run import DryRunResult, dry_run
from wanma.training.loss.loss_functions import CrossEntropy
from wanma.training.step.forward_backward import ForwardBackward

LENGTH, MICRO_BATCHES = 32, 3
MODEL = {"family": "decoder", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "vocabulary": 64}

PLANS = {
    "tensor 2 × ZeRO 3": Plan(tp=2, sequence_parallel=True, dp_shard=2, shard="parameters", micro_batch=2),
    "ZeRO 1, recomputing": Plan(dp_shard=2, shard="optimizer", micro_batch=1, recompute="full"),
    "ZeRO 2": Plan(dp_shard=2, shard="gradients", micro_batch=1),
    "ring of 2 × 2 replicas": Plan(cp=2, dp_replicate=2, micro_batch=1),
    "all-to-all over 2": Plan(cp=2, cp_method="all_to_all", micro_batch=1),
    "2 replicas in 8 bits": Plan(dp_replicate=2, micro_batch=1, compression="int8"),
    "thin matrices of 2 × ZeRO 2": Plan(
        dp_replicate=2, dp_shard=2, shard="gradients", micro_batch=1, compression="powersgd"
    ),
    "pipeline 2 × ZeRO 1": Plan(pp=2, stage_cuts=(1,), dp_shard=2, shard="optimizer", micro_batch=1),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.daily("ring of 2 × 2 replicas", "2 replicas in 8 bits", "pipeline 2 × ZeRO 1")
def test_a_dry_run_counts_what_a_real_step_sends(plan: Plan) -> None:
    ranks = run_ranks(_real_step, plan.world_size, (plan,), is_reused=True)
    for rank in (0, plan.world_size - 1):
        counts, parameters = ranks[rank]
        (dry,) = run_ranks(_dry_step, 1, (plan, rank), is_reused=True)
        assert Counter({_key(c): count for c, count in dry.collectives}) == counts
        assert dry.parameter_elements == parameters


def _dry_step(_: WorkerContext, plan: Plan, rank: int) -> DryRunResult:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Accessing the data pointer")  # of tensors without data
        return dry_run(_spec(), plan, rank, LENGTH, MICRO_BATCHES)


def _spec() -> ModelSpec:
    return text_spec(MODEL, 64, LENGTH)


def _key(collective: Any) -> tuple[str, tuple[int, ...], int]:
    return collective.operation, collective.group_ranks, collective.tensor_bytes


def _real_step(worker: WorkerContext, plan: Plan) -> tuple[Counter[Any], int]:
    """The second step of this rank: the first also finds out shapes."""
    # What goes over shared memory is not dispatched by torch, and so not recorded.
    with open_mesh(worker, plan, 60, "gloo") as grid:
        parallel = parallelize(_spec(), plan, grid, 1)
        parallel.initialize_parameters()
        run = ForwardBackward(parallel, plan, grid, CrossEntropy(classes_last=True))
        rows = plan.micro_batch
        tokens = torch.randint(64, (rows, LENGTH), generator=torch.Generator().manual_seed(worker.rank))
        batch = Batch((tokens,), tokens, torch.arange(rows), torch.ones(rows, dtype=torch.bool))
        for _ in range(2):
            for _, parameter in parallel.named_parameters():
                parameter.grad = None
            with CollectiveCounter() as recorder:
                run([batch] * MICRO_BATCHES, 1.0)
                dist.all_reduce(torch.zeros(4, dtype=torch.float64))
        held = [p.to_local() if isinstance(p, DTensor) else p for _, p in parallel.named_parameters()]
        counts = Counter({_key(c): count for c, count in recorder.counts.items()})
        return counts, sum(tensor.numel() for tensor in held)
