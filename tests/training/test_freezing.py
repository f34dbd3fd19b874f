"""Parameters that are frozen and released while training goes on are trained as a plain loop trains them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wanma
from support.compare import full_tensor
from support.full_batch import ROWS, adamw, full_batch_job, largest_error, plain_loop, trained
from support.own import Numbers, seeded
from support.own_loop import started_by_launch
from support.ranks import run_job, run_ranks
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext

STEPS = 5
DATA = Numbers(size=ROWS)
LAYOUTS = {
    "one": Plan(micro_batch=8),
    "2 replicas": Plan(dp_replicate=2, micro_batch=4),
    "ZeRO 1": Plan(dp_shard=2, shard="optimizer", micro_batch=4),
    "ZeRO 2": Plan(dp_shard=2, shard="gradients", micro_batch=4),
    "ZeRO 3": Plan(dp_shard=2, shard="parameters", micro_batch=4),
}


class Body(nn.Module):
    """A classifier of three layers, the first frozen; two blocks are units of sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(16, 4)
        self.first.requires_grad_(False)
        self.blocks[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits: Tensor = self.last(hidden)
        return logits


class Thawing(Body):
    """Releases its first layers in the third forward, and freezes its last in the fourth."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            if self.calls == 3:
                self.first.requires_grad_(True)
                self.blocks[0].requires_grad_(True)
        logits = super().forward(x)
        if self.training and self.calls == 4:
            self.last.requires_grad_(False)
        return logits


def optimizer(model: nn.Module) -> Any:
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    weights = [p for n, p in model.named_parameters() if n.endswith("weight")]
    return (adamw([{"params": weights}, {"params": biases, "weight_decay": 0.0}]),)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.daily("one", "2 replicas", "ZeRO 3")
def test_a_model_freezes_and_releases_in_its_forward(layout: str, tmp_path: Path) -> None:
    model = seeded(Thawing)
    expected = plain_loop(model, DATA, STEPS, optimizer)
    got = trained(tmp_path / "run", full_batch_job(STEPS), LAYOUTS[layout], model, DATA)
    assert not torch.equal(expected["first.weight"], model.first.weight.double())
    assert largest_error(expected, got) < 1e-12


def by_hand(model: Any, step: int) -> None:
    if step == 2:
        model.first.requires_grad_(True)
        model.blocks[0].requires_grad_(True)
    if step == 3:
        model.last.requires_grad_(False)


def loop(worker: WorkerContext, job: dict[str, Any], folder: Path, before_batch: bool) -> dict[str, Any]:
    """`by_hand` in a loop of one's own: before a step's forward, or after the step before."""
    with started_by_launch(worker, folder), wanma.session(job, run_directory=None) as session:
        model = session.prepare(seeded(Body))
        for step, batch in enumerate(session.batches((DATA, DATA))):
            if before_batch:
                by_hand(model, step)
            session.step(F.cross_entropy(model(*batch.inputs), batch.targets, reduction="none"))
            if not before_batch:
                by_hand(model, step + 1)
        return {name: full_tensor(parameter).tolist() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("before_batch", [True, False])
@pytest.mark.parametrize("parallel", [{"dp_replicate": 2}, {"dp_shard": 2, "shard": "parameters"}], ids=str)
@pytest.mark.daily("{'dp_replicate': 2}-True", "{'dp_shard': 2, 'shard': 'parameters'}-False")
def test_a_loop_freezes_and_releases_by_hand(
    parallel: dict[str, Any], before_batch: bool, tmp_path: Path
) -> None:
    model = seeded(Body)
    expected = plain_loop(model, DATA, STEPS, optimizer, before_step=by_hand)
    job = {**full_batch_job(STEPS), "parallel": {**parallel, "micro_batch": 4}}
    for numbers in run_ranks(loop, 2, (job, tmp_path, before_batch)):
        got = {name: torch.tensor(values, dtype=torch.float64) for name, values in numbers.items()}
        assert largest_error(expected, got) < 1e-12


class Remembering(Body):
    """`Thawing` of which a checkpoint knows how far it has come."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            if self.calls >= 3:
                self.first.requires_grad_(True)
        return super().forward(x)


def test_a_run_that_carries_on_counts_the_updates_of_each_parameter(tmp_path: Path) -> None:
    model = seeded(Remembering)
    whole = trained(tmp_path / "whole", full_batch_job(6), LAYOUTS["one"], model, DATA)
    plan = replace(LAYOUTS["one"], precision="fp64")
    for steps in (4, 6):
        outcome = run_job(
            tmp_path / "parts", full_batch_job(steps), plan, objects={"model": model, "data": (DATA, DATA)}
        )
    tensors = outcome.tensors()
    assert tensors["optimizer.first.weight.step"] == 4
    for name, tensor in whole.items():
        assert torch.equal(tensor, tensors[f"model.{name}"]), name


class Stubborn(Body):
    def forward(self, x: Tensor) -> Tensor:
        self.first.requires_grad_(True)
        return super().forward(x)


@pytest.mark.parametrize("layout", ["2 replicas", "ZeRO 3"])
def test_what_the_job_freezes_is_not_released(layout: str, tmp_path: Path) -> None:
    job = full_batch_job(1, parameter_groups=[{"match": "first.*", "frozen": True}])
    with pytest.raises(AssertionError, match=r"first\.\w+: .* requires_grad = True"):
        trained(tmp_path / "run", job, LAYOUTS[layout], seeded(Stubborn), DATA)


class Listed(Body):
    """Keeps its parameters in a list, which is not what it computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = list(self.first.parameters())

    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.frozen:
            parameter.requires_grad_(True)
        return super().forward(x)


def test_a_flag_that_reaches_no_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="was set on an old reference"):
        trained(tmp_path / "run", full_batch_job(1), LAYOUTS["one"], seeded(Listed), DATA)


def test_a_model_of_which_nothing_is_trained_is_refused(tmp_path: Path) -> None:
    model = seeded(Body).requires_grad_(False)
    with pytest.raises(AssertionError, match="depends on no trainable"):
        trained(tmp_path / "run", full_batch_job(1), LAYOUTS["one"], model, DATA)


def test_a_unit_that_was_frozen_is_summed_in_fp32_once_released(tmp_path: Path) -> None:
    """FSDP2 looks at a unit's precision when it begins, and finds none where nothing is trained."""
    ends = []
    for layout in ("2 replicas", "ZeRO 2"):
        plan = replace(LAYOUTS[layout], precision="bf16")
        job = full_batch_job(STEPS, precision="bf16")
        outcome = run_job(
            tmp_path / layout, job, plan, objects={"model": seeded(Thawing), "data": (DATA, DATA)}
        )
        ends.append(outcome.tensors()["model.blocks.0.0.weight"])
    assert not torch.equal(ends[0], seeded(Thawing).blocks[0][0].weight)
    assert torch.equal(ends[0], ends[1])


class Stage(nn.Module):
    """Releases its layer in its third forward."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs).requires_grad_(False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            if self.calls == 3:
                self.layer.requires_grad_(True)
        result: Tensor = self.layer(x).tanh()
        return result


def staged() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), Stage(16, 16), nn.Linear(16, 16), Stage(16, 16), nn.Linear(16, 4))


def test_a_stage_of_a_pipeline_releases_its_parameters(tmp_path: Path) -> None:
    model = seeded(staged)
    job = full_batch_job(STEPS)
    one = trained(tmp_path / "one", job, Plan(micro_batch=4), model, DATA)
    two = trained(tmp_path / "two", job, Plan(pp=2, micro_batch=4), model, DATA)
    assert not torch.equal(one["3.layer.weight"], model.get_parameter("3.layer.weight").double())
    assert largest_error(one, two) < 1e-12
