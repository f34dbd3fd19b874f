"""Data parallel without FSDP2: what computes is the state, and gradients are summed once per step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from support.ranks import run_ranks
from wanma.collectives.gloo import Stopwatch
from wanma.job.plan import Plan
from wanma.job.worker import Worker
from wanma.parallel import whole
from wanma.parallel.mesh import process_grid
from wanma.parallel.whole import Whole


class Branches(nn.Module):
    """Uses one of two matrices; two modules share the first, and the last is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(3, 3)
        self.same = nn.Linear(3, 3)
        self.same.weight = self.first.weight
        self.second = nn.Linear(3, 3)
        self.unused = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor, to_second: bool) -> Tensor:
        return self.second(x) if to_second else self.same(self.first(x)) * self.frozen


@pytest.mark.parametrize("bucket_bytes", [0, 40, 1 << 20])
def test_gradients_are_the_replicas_sums_whoever_of_them_has_one(bucket_bytes: int) -> None:
    model, sums = Branches(), {}
    for rank in range(2):
        model(given(rank), rank == 1).sum().backward()
    for name, parameter in model.named_parameters():
        sums[name] = None if parameter.grad is None else parameter.grad.flatten().tolist()
    assert sums["unused"] is None
    assert sums["second.weight"] is not None
    for of_rank in run_ranks(gradients, 2, (bucket_bytes,)):
        assert of_rank.keys() == sums.keys()
        for name, expected in sums.items():
            assert of_rank[name] == (None if expected is None else pytest.approx(expected, rel=1e-6)), name


def test_what_computes_is_the_memory_of_the_state_and_leaves_it_after_the_step() -> None:
    for held in run_ranks(memory, 2, ()):
        assert held["while it computes"] == held["at rest"]
        assert held["kind at rest"] == [True] * len(held["at rest"])
        assert held["kind while it computes"] == [False] * len(held["at rest"])
        assert held["names"] == [name for name, _ in Branches().named_parameters()]


def test_what_comes_in_is_cast_for_proofs_in_full_precision() -> None:
    assert run_ranks(precision_of_output, 1, ()) == ["torch.float64"]


def given(rank: int) -> Tensor:
    return torch.full((2, 3), 1.0 + rank)


def gradients(worker: Worker, bucket_bytes: int) -> dict[str, Any]:
    whole.REDUCED_TOGETHER_BYTES = bucket_bytes  # this process ends with the test
    with process_grid(worker, Plan(dp_replicate=2, precision="fp32"), 60) as grid:
        model = Branches()
        held = Whole(model, grid, Stopwatch(), None)
        model(given(worker.rank), worker.rank == 1).sum().backward()
        held.end_backward()
        return {
            name: None if parameter.grad is None else parameter.grad.to_local().flatten().tolist()
            for name, parameter in model.named_parameters()
        }


def memory(worker: Worker) -> dict[str, Any]:
    with process_grid(worker, Plan(dp_replicate=2, precision="fp32"), 60) as grid:
        model = Branches()
        held = Whole(model, grid, Stopwatch(), None)
        found: dict[str, Any] = {"names": [name for name, _ in model.named_parameters()]}
        found["at rest"] = [local(parameter).data_ptr() for parameter in model.parameters()]
        found["kind at rest"] = [isinstance(parameter, DTensor) for parameter in model.parameters()]
        model(given(0), False).sum().backward()
        found["while it computes"] = [local(parameter).data_ptr() for parameter in model.parameters()]
        found["kind while it computes"] = [isinstance(parameter, DTensor) for parameter in model.parameters()]
        held.end_backward()
        assert [local(parameter).data_ptr() for parameter in model.parameters()] == found["at rest"]
        model(given(0), False)
        held.rest()
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        return found


def precision_of_output(worker: Worker) -> str:
    with process_grid(worker, Plan(precision="fp64"), 60) as grid:
        model = Branches().double()
        Whole(model, grid, Stopwatch(), torch.float64)
        return str(model(given(0), False).dtype)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
