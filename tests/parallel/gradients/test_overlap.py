"""Gradients that are summed while backward goes on are, bit for bit, those that are summed at its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from support.compare import same_bits, same_curve
from support.ranks import run_job, run_ranks
from support.text import text_job, text_spec
from support.traced import trace_only
from wanma.data.batch import Batch
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.models.model_spec import ModelSpec, wrap_module
from wanma.parallel.gradients.gradient_reducer import GradientReducer
from wanma.parallel.mesh.parallel_mesh import ParallelMesh, open_mesh
from wanma.parallel.parallelize import ParallelModel, parallelize
from wanma.training.loss.loss_functions import CrossEntropy
from wanma.training.step.forward_backward import ForwardBackward

LENGTH, VOCABULARY, ROWS, MICRO_BATCHES = 16, 64, 2, 3
DECODER = {"family": "decoder", "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2}
EXPERTS = {"experts": 4, "experts_per_token": 1, "expert_feed_forward": 8, "balance": "none"}
BUCKETS = (1, 1 << 12, 1 << 30)

PLANS = {
    "3 replicas": Plan(dp_replicate=3),
    "recomputing in full": Plan(dp_replicate=3, recompute="full"),
    "recomputing a part": Plan(dp_replicate=2, recompute="selective"),
    "tensor × replicas": Plan(tp=2, dp_replicate=2),
    "tensor + sequence × replicas": Plan(tp=2, sequence_parallel=True, dp_replicate=2),
    "ring": Plan(cp=2),
    "all-to-all × replicas": Plan(cp=2, cp_method="all_to_all", dp_replicate=2),
}


@pytest.mark.parametrize("model", ["plain", "tied", "experts"])
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.daily(
    "3 replicas-experts",
    "recomputing in full-tied",
    "recomputing a part-plain",
    "tensor + sequence × replicas-tied",
    "ring-experts",
    "all-to-all × replicas-plain",
)
def test_gradients_are_the_same_bit_for_bit(name: str, model: str) -> None:
    plan = replace(PLANS[name], micro_batch=ROWS)
    for of_rank in run_ranks(decoder_both_ways, plan.world_size, (plan, model), is_reused=True):
        for bucket_bytes, (same, early) in of_rank.items():
            assert same == [], bucket_bytes
            # All but what tensor ranks have parts of, unless one bucket holds everything.
            assert early > 0


@pytest.mark.full
def test_gradients_of_compiled_blocks_are_the_same_bit_for_bit() -> None:
    plan = Plan(dp_replicate=2, micro_batch=ROWS, compile=True)
    for of_rank in run_ranks(trace_only, 2, (decoder_both_ways, plan, "plain"), is_reused=True):
        for same, early in of_rank.values():
            assert same == []
            assert early > 0


class Routed(nn.Module):
    """Sends a sample to one of two experts; a third is never used, and a bias is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.before = nn.Linear(3, 3)
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.after = nn.Linear(3, 3)
        self.after.bias.requires_grad_(False)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        output: Tensor = self.after(self.experts[expert](self.before(x)))
        return output


class Again(nn.Module):
    """Uses one matrix in two checkpoints whose backwards are backwards of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.shared = nn.Linear(3, 3)
        self.last = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True)
        output: Tensor = self.last(x)
        return output


def test_experts_without_tokens_and_frozen_parameters_hold_nobody_up() -> None:
    expected = custom_gradients(
        Routed(), [(given(rank, at), expert(rank, at)) for rank in (0, 1) for at in (0, 1)]
    )
    assert expected["experts.2.weight"] is None
    assert expected["after.bias"] is None
    for of_rank in run_ranks(routed_both_ways, 2, (), is_reused=True):
        for found in of_rank:
            assert found.keys() == expected.keys()
            for name, gradient in expected.items():
                if gradient is None:
                    assert found[name] is None
                else:
                    assert found[name] == pytest.approx(gradient, rel=1e-6), name
        assert of_rank[1:] == of_rank[:-1]  # bit for bit, over all sizes of buckets


def test_a_gradient_that_a_backward_makes_twice_is_whole_and_is_summed_at_the_end_from_then_on() -> None:
    model = Again()
    for rank in (0, 1):
        model(given(rank, 0)).sum().backward()
    for steps in run_ranks(again_both_ways, 2, (), is_reused=True):
        for found, _ in steps:
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                assert found[name] == pytest.approx(parameter.grad.flatten().tolist(), rel=1e-6), name
        assert [early > 0 for _, early in steps] == [True, False, False]


def test_a_run_with_overlap_and_one_without_end_in_the_same_bits(tmp_path: Path) -> None:
    job = text_job(tmp_path, {**DECODER, "dropout": 0.1}, steps=3, global_batch=8, validation_samples=2)
    plan = Plan(dp_replicate=3, micro_batch=1, bucket_bytes=1 << 12)
    overlapped = run_job(tmp_path / "overlapped", job, plan)
    after = run_job(tmp_path / "after", job, replace(plan, overlap=False))
    same_bits(overlapped, after)
    for step in overlapped.steps:
        assert (
            0
            < step["exposed_communication_seconds"]["data"]
            <= step["communication_seconds"]["data"]
            <= step["step_seconds"]
        )


def test_zero_3_gathers_ahead_of_use_without_a_bit_of_difference(tmp_path: Path) -> None:
    job = text_job(tmp_path, DECODER, steps=3, global_batch=4, validation_samples=2)
    plan = Plan(dp_shard=2, shard="parameters", micro_batch=1)
    same_bits(
        run_job(tmp_path / "ahead", job, plan),
        run_job(tmp_path / "when-needed", job, replace(plan, overlap=False)),
    )


@pytest.mark.parametrize("pipeline", ["1f1b", "interleaved_zero_bubble"])
@pytest.mark.daily("interleaved_zero_bubble")
def test_pipelines_sum_after_their_last_backward_and_tell_what_they_wait_for(
    pipeline: Any, tmp_path: Path
) -> None:
    job = text_job(tmp_path, {**DECODER, "layers": 4}, steps=2, global_batch=8, validation_samples=2)
    virtual = 1 if pipeline == "1f1b" else 2
    cuts = (2,) if virtual == 1 else (1, 2, 3)
    plan = Plan(
        pp=2, dp_replicate=2, micro_batch=1, schedule=pipeline, virtual_stages=virtual, stage_cuts=cuts
    )
    overlapped = run_job(tmp_path / "overlapped", job, plan)
    same_bits(overlapped, run_job(tmp_path / "after", job, replace(plan, overlap=False)))
    for step in overlapped.steps:
        assert 0 < step["exposed_communication_seconds"]["pipeline"] < step["step_seconds"]


@pytest.mark.parametrize("counts", [(2, 2), (3, 1), (4,)], ids=str)
@pytest.mark.daily("(3, 1)")
def test_sums_by_nodes_are_those_of_all_ranks(counts: tuple[int, ...], tmp_path: Path) -> None:
    job = text_job(tmp_path, DECODER, steps=2, global_batch=8, validation_samples=2, precision="fp64")
    plan = Plan(dp_replicate=4, micro_batch=1, precision="fp64", bucket_bytes=1 << 12)
    nodes = {rank: {"local_world_sizes": counts} for rank in range(4)}
    plain = run_job(tmp_path / "plain", job, plan)
    by_nodes = run_job(tmp_path / "by-nodes", job, replace(plan, all_reduce="hierarchical"), workers=nodes)
    same_curve(plain, by_nodes, 1e-12)
    # In the order of the nodes, whenever they are begun: bit for bit.
    after = run_job(
        tmp_path / "after", job, replace(plan, all_reduce="hierarchical", overlap=False), workers=nodes
    )
    same_bits(by_nodes, after)


# ---------------------------------------------------------------- in each rank


def decoder_both_ways(worker: WorkerContext, plan: Plan, model: str) -> dict[int, tuple[list[str], int]]:
    """By size of buckets: names whose gradients differ between the two ways, and how many buckets began
    early."""
    tokens = torch.randint(
        VOCABULARY, (MICRO_BATCHES, ROWS, LENGTH), generator=torch.Generator().manual_seed(worker.rank)
    )
    with note_early_ones() as begun, open_mesh(worker, plan, 60) as grid:
        if plan.tp > 1 or plan.cp > 1:  # ranks that share samples have the same
            tokens = torch.randint(
                VOCABULARY, tokens.shape, generator=torch.Generator().manual_seed(grid.data_rank)
            )
        batches = [batch_of(of) for of in tokens]
        found = {}
        for bucket_bytes in BUCKETS:
            one, early = step_gradients(
                grid, spec_of(model), batches, bucket_bytes, overlap=True, begun=begun
            )
            other, never = step_gradients(
                grid, spec_of(model), batches, bucket_bytes, overlap=False, begun=begun
            )
            assert never == 0
            assert one.keys() == other.keys()
            found[bucket_bytes] = [name for name in one if not same(one[name], other[name])], early
        return found


def step_gradients(
    grid: ParallelMesh,
    spec: ModelSpec,
    batches: list[Batch],
    bucket_bytes: int,
    *,
    overlap: bool,
    begun: list[int],
) -> tuple[dict[str, Tensor | None], int]:
    plan = replace(grid.plan, overlap=overlap, bucket_bytes=bucket_bytes)
    grid = replace(grid, plan=plan)
    parallel = parallelize(spec, plan, grid, 1)
    parallel.initialize_parameters()
    run = ForwardBackward(parallel, plan, grid, CrossEntropy(classes_last=True))
    begun.clear()
    run(batches, 1.0)
    return gradients_of(parallel), sum(begun)


def spec_of(model: str) -> ModelSpec:
    more = {"plain": {"dropout": 0.1}, "tied": {"tie_embeddings": True}, "experts": EXPERTS}[model]
    return text_spec({**DECODER, **more}, VOCABULARY, LENGTH)


def batch_of(tokens: Tensor) -> Batch:
    rows = len(tokens)
    return Batch((tokens,), tokens, torch.arange(rows), torch.ones(rows, dtype=torch.bool))


@contextmanager
def note_early_ones() -> Iterator[list[int]]:
    """Number of buckets that each step began before its end."""
    begun: list[int] = []
    finish = GradientReducer.finalize

    def noting(sums: GradientReducer, *arguments: Any) -> dict[int, Tensor]:
        begun.append(sums._next_bucket)
        return finish(sums, *arguments)

    with mock.patch.object(GradientReducer, "finalize", noting):
        yield begun


def gradients_of(parallel: ParallelModel) -> dict[str, Tensor | None]:
    found: dict[str, Tensor | None] = {}
    for name, parameter in parallel.named_parameters():
        gradient = parameter.grad
        found[name] = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return found


def same(one: Tensor | None, other: Tensor | None) -> bool:
    return (one is None and other is None) or (
        one is not None and other is not None and torch.equal(one, other)
    )


def given(rank: int, at: int) -> Tensor:
    return torch.full((2, 3), 1.0 + rank + 0.5 * at)


def expert(rank: int, at: int) -> int:
    """The second rank's tokens never go to the first expert, and none of the last micro-batch do."""
    return 0 if (rank, at) == (0, 0) else 1


def custom_gradients(model: nn.Module, calls: Sequence[tuple[Any, ...]]) -> dict[str, list[float] | None]:
    for arguments in calls:
        model(*arguments).sum().backward()
    return {
        name: None if parameter.grad is None else parameter.grad.flatten().tolist()
        for name, parameter in model.named_parameters()
    }


def routed_both_ways(worker: WorkerContext) -> list[dict[str, Any]]:
    found = []
    with open_mesh(worker, Plan(dp_replicate=2), 60) as grid:
        for bucket_bytes in BUCKETS:
            for overlap in (True, False):
                plan = replace(grid.plan, bucket_bytes=bucket_bytes, overlap=overlap)
                parallel = parallelize(wrap_module(Routed()), plan, replace(grid, plan=plan), 1)
                for at in (0, 1):
                    parallel.begin_micro_batch(is_last=at == 1)
                    parallel.module(given(worker.rank, at), expert(worker.rank, at)).sum().backward()
                parallel.finalize_gradients()
                found.append(listed(gradients_of(parallel)))
    return found


def again_both_ways(worker: WorkerContext) -> list[tuple[dict[str, Any], int]]:
    found = []
    plan = Plan(dp_replicate=2, bucket_bytes=1)
    with note_early_ones() as begun, open_mesh(worker, plan, 60) as grid:
        parallel = parallelize(wrap_module(Again()), grid.plan, grid, 1)
        for _ in range(3):
            begun.clear()
            parallel.begin_micro_batch(is_last=True)
            parallel.module(given(worker.rank, 0)).sum().backward()
            parallel.finalize_gradients()
            found.append((listed(gradients_of(parallel)), sum(begun)))
            for _, parameter in parallel.named_parameters():
                parameter.grad = None
    return found


def listed(gradients: dict[str, Tensor | None]) -> dict[str, list[float] | None]:
    return {name: None if one is None else one.flatten().tolist() for name, one in gradients.items()}
