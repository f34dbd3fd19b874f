"""Muon is torch's on one process, and the same on any placement of its matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.compare import one_process, same_numbers, spread_over
from support.text import text_job
from wanma.job.plan.plan import Plan
from wanma.training.optimizer.muon import Muon, orthogonalize


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_one_process_it_is_torchs_bit_for_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = [(8, 8), (24, 8), (8, 40)]
    ours = [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    group: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    optimizers = (
        Muon([{"params": ours, "weight_decay": 0.1}], lr=0.02, momentum=0.9),
        torch.optim.Muon(theirs, **group),
    )
    for _ in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator, dtype=dtype)
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("shape", [(16, 16), (48, 16), (16, 48)])
def test_singular_values_end_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    values = torch.linalg.svdvals(orthogonalize(matrix).float())
    assert values.min() > 0.5
    assert values.max() < 1.3


PLANS = [
    Plan(dp_replicate=2, micro_batch=2),
    Plan(dp_shard=4, shard="parameters", micro_batch=1),
    Plan(tp=2, sequence_parallel=True, micro_batch=3),
    Plan(tp=4, sequence_parallel=True, micro_batch=3),
    Plan(tp=2, sequence_parallel=True, dp_shard=2, shard="optimizer", micro_batch=2),
    Plan(dp_replicate=2, dp_shard=2, shard="gradients", micro_batch=2),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.daily(
    "2 ranks (dp_replicate 2), fp32, cpu",
    "2 ranks (tp 2), fp32, cpu",
    "4 ranks (dp_replicate 2 × dp_shard 2), gradients sharded, fp32, cpu",
)
def test_every_plan_gives_the_numbers_of_one_process(plan: Plan, reference: Any, tmp_path: Path) -> None:
    # Newton-Schulz is in bf16, but of the same whole matrix everywhere: nothing is left of the layout but
    # the order of fp64 sums.
    job, one = reference
    same_numbers(one, spread_over(tmp_path / "run", job, plan), 1e-9)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("muon")
    # The two rows of a key projection do not divide among four ranks: some hold nothing of it.
    model = {"family": "decoder", "layers": 2, "hidden": 8, "heads": 4, "kv_heads": 1}
    train = {"precision": "fp64", "optimizer": "muon", "steps": 4, "global_batch": 6, "deterministic": True}
    job = text_job(folder, model, validation_samples=3, **train)
    return job, one_process(folder / "one", job, 6)
