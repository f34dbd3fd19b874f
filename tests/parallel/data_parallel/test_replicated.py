"""Data parallel without FSDP2: what computes is the state, and gradients are summed once per step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from support.ranks import run_ranks
from wanma.collectives.timing.communication_timer import CommunicationTimer
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.models.model_spec import wrap_module
from wanma.parallel.data_parallel.replicated import Replicated
from wanma.parallel.memory.disk_pool import DiskPool
from wanma.parallel.mesh.parallel_mesh import open_mesh
from wanma.parallel.parallelize import parallelize
from wanma.parallel.parameters.stale_parameters import StaleParameterCheck
from wanma.parallel.tensor.local_parameters import distribute_parameters


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


class Recurrent(nn.Module):
    """Model of a torch module that keeps a list of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.lstm = nn.LSTM(3, 3)
        self.gru = nn.GRU(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.gru(self.lstm(x)[0])[0]
        return output


class Listed(nn.Module):
    """Computes with a parameter that it keeps in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.ones(3))
        self.kept = nn.Parameter(torch.ones(3))
        self.list = [self.kept]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.used * self.list[0]


class Scaled(nn.Module):
    """Multiplies by a whole parameter what a tensor rank holds a part of, as DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        part: Any = DTensor.from_local(x, weight.device_mesh, [Shard(0)]) * weight
        output: Tensor = part.to_local()
        return output


@pytest.mark.parametrize("bucket_bytes", [1, 40, 1 << 20])
def test_gradients_are_the_replicas_sums_whoever_of_them_has_one(bucket_bytes: int) -> None:
    model, sums = Branches(), {}
    for rank in range(2):
        model(given(rank), rank == 1).sum().backward()
    for name, parameter in model.named_parameters():
        sums[name] = None if parameter.grad is None else parameter.grad.flatten().tolist()
    assert sums["unused"] is None
    assert sums["second.weight"] is not None
    for of_rank in run_ranks(gradients, 2, (bucket_bytes,), is_reused=True):
        assert of_rank.keys() == sums.keys()
        for name, expected in sums.items():
            assert of_rank[name] == (None if expected is None else pytest.approx(expected, rel=1e-6)), name


def test_what_computes_is_the_memory_of_the_state_and_leaves_it_after_the_step() -> None:
    for held in run_ranks(memory, 2, (), is_reused=True):
        assert held["while it computes"] == held["at rest"]
        assert held["names"] == [name for name, _ in Branches().named_parameters()]


def test_what_comes_in_is_cast_for_proofs_in_full_precision() -> None:
    assert run_ranks(precision_of_output, 1, (), is_reused=True) == ["torch.float64"]


def test_recurrent_layers_are_trained() -> None:
    model = Recurrent()
    for rank in range(2):
        model(given(rank)).sum().backward()
    for of_rank in run_ranks(recurrent_gradients, 2, (), is_reused=True):
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert of_rank[name] == pytest.approx(parameter.grad.flatten().tolist(), rel=1e-5), name


@pytest.mark.parametrize("plan", [Plan(), Plan(offload_parameters="disk")], ids=["whole", "FSDP2"])
def test_a_parameter_that_the_model_takes_from_elsewhere_is_refused_by_name(plan: Plan) -> None:
    with pytest.raises(AssertionError, match="kept: the forward pass uses an old"):
        run_ranks(train_listed, 1, (plan,), is_reused=True)


def test_a_gradient_from_before_the_training_is_no_reason_to_refuse() -> None:
    model = Listed()
    model(torch.ones(3)).sum().backward()
    strays = StaleParameterCheck(model)
    model(torch.ones(3)).sum().backward()
    strays.check()


def test_a_gradient_that_tensor_ranks_hold_by_parts_is_put_together() -> None:
    assert run_ranks(gradient_by_parts, 2, (), is_reused=True) == [[1.0, 2.0, 3.0, 4.0]] * 2


def test_what_is_frozen_or_released_between_steps_is_so_in_the_next() -> None:
    assert run_ranks(frozen_by_steps, 1, (), is_reused=True) == [[True, False, True]]


def given(rank: int) -> Tensor:
    return torch.full((2, 3), 1.0 + rank)


def gradients(worker: WorkerContext, bucket_bytes: int) -> dict[str, Any]:
    plan = Plan(dp_replicate=2, precision="fp32", bucket_bytes=bucket_bytes)
    with open_mesh(worker, plan, 60) as grid:
        model = Branches()
        held = Replicated(model, grid, CommunicationTimer(), None)
        model(given(worker.rank), worker.rank == 1).sum().backward()
        held.finalize_gradients()
        return {
            name: None if parameter.grad is None else parameter.grad.flatten().tolist()
            for name, parameter in model.named_parameters()
        }


def memory(worker: WorkerContext) -> dict[str, Any]:
    with open_mesh(worker, Plan(dp_replicate=2, precision="fp32"), 60) as grid:
        model = Branches()
        held = Replicated(model, grid, CommunicationTimer(), None)
        found: dict[str, Any] = {"names": [name for name, _ in model.named_parameters()]}
        found["at rest"] = [local(parameter).data_ptr() for parameter in model.parameters()]
        states = list(model.parameters())
        model(given(0), False).sum().backward()
        found["while it computes"] = [local(parameter).data_ptr() for parameter in model.parameters()]
        assert not any(one is other for one in model.parameters() for other in states)
        held.finalize_gradients()
        assert [local(parameter).data_ptr() for parameter in model.parameters()] == found["at rest"]
        model(given(0), False)
        held.reshard()
        assert all(one is other for one, other in zip(model.parameters(), states, strict=True))
        return found


def recurrent_gradients(worker: WorkerContext) -> dict[str, list[float]]:
    with open_mesh(worker, Plan(dp_replicate=2), 60) as grid:
        parallel = parallelize(wrap_module(Recurrent()), grid.plan, grid, 1)
        parallel.module(given(worker.rank)).sum().backward()
        parallel.finalize_gradients()
        return {name: whole_gradient(parameter) for name, parameter in parallel.named_parameters()}


def train_listed(worker: WorkerContext, plan: Plan) -> None:
    with open_mesh(worker, plan, 60) as grid, DiskPool(worker.run_directory) as scratch:
        parallel = parallelize(wrap_module(Listed()), plan, grid, 1, scratch)
        parallel.begin_micro_batch(is_last=True)
        parallel.module(torch.ones(3)).sum().backward()
        parallel.finalize_gradients()


def gradient_by_parts(worker: WorkerContext) -> list[float]:
    with open_mesh(worker, Plan(tp=2), 60) as grid:
        model = Scaled()
        distribute_parameters(model, grid.dim_mesh("tp"), {"weight": Replicate()})
        held = Replicated(model, grid, CommunicationTimer(), None)
        first = 1.0 + 2 * worker.rank
        model(torch.tensor([first, first + 1])).sum().backward()
        held.finalize_gradients()
        return whole_gradient(model.weight)


def frozen_by_steps(worker: WorkerContext) -> list[bool]:
    with open_mesh(worker, Plan(), 60) as grid:
        model = Branches()
        held = Replicated(model, grid, CommunicationTimer(), None)
        found = []
        for trained in (True, False, True):
            model.first.bias.grad = None
            model.first.bias.requires_grad_(trained)
            model(given(0), False).sum().backward()
            held.finalize_gradients()
            found.append(model.first.bias.grad is not None)
        return found


def whole_gradient(parameter: nn.Parameter) -> list[float]:
    gradient = parameter.grad
    assert gradient is not None
    if not isinstance(gradient, DTensor):
        assert gradient.shape == parameter.shape
        return gradient.flatten().tolist()  # type: ignore[no-any-return]
    assert gradient.placements == parameter.placements  # type: ignore[attr-defined]  # a DTensor too
    assert gradient.to_local().shape == parameter.to_local().shape  # type: ignore[attr-defined]  # likewise
    values: list[float] = gradient.full_tensor().flatten().tolist()
    return values


def precision_of_output(worker: WorkerContext) -> str:
    with open_mesh(worker, Plan(precision="fp64"), 60) as grid:
        model = Branches().double()
        Replicated(model, grid, CommunicationTimer(), torch.float64)
        return str(model(given(0), False).dtype)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
