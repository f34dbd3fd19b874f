"""Optimizers and schedules of the user's: as in a plain loop on every layout, or refused beforehand."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wanma
from support.compare import same_numbers
from support.own import Numbers, Plain, seeded
from support.own_loop import session_job
from support.ranks import run_here, run_job
from wanma.checkpoint.store.checkpoint_folder import read_manifest
from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan
from wanma.job.plan.synchronization import Synchronization
from wanma.job.sections.train import TrainSection
from wanma.training.optimizer.optimizer_attributes import read_attributes, write_attributes
from wanma.training.optimizer.user_optimizer import UserOptimizer, check_schedule, update_scope_of
from wanma.training.optimizer.user_optimizer_trial import try_user_optimizer

STEPS = 4


class Signs(torch.optim.Optimizer):
    """Lion (Chen et al. 2023): element by element."""

    def __init__(self, groups: Iterable[Any], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group)

    def update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(group["lr"] * momentum.lerp(parameter.grad, 0.1).sign())
        momentum.lerp_(parameter.grad, 0.01)


class Scaled(Signs):
    """Divides by each tensor's norm."""

    def update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        parameter.sub_(group["lr"] * parameter.grad / parameter.grad.norm())


class Clipped(Signs):
    """Divides by the norm of all."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        super().step()


class Noisy(Signs):
    def update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        parameter.add_(torch.randn_like(parameter) * group["lr"])


class Counting(Signs):
    """Counts in an attribute."""

    seen = 0

    def update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        self.seen += 1
        parameter.sub_(group["lr"] * parameter.grad * math.sin(self.seen))


class Forgetful(Signs):
    """Counts in its class."""

    seen = 0

    def update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        type(self).seen += 1
        super().update(parameter, group)


class Wrapping(Signs):
    """Leaves the update to another optimizer."""

    def __init__(self, groups: Iterable[Any], lr: float) -> None:
        super().__init__(groups, lr)
        self.inner = torch.optim.Adam([{**group} for group in self.param_groups], lr)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.inner.step()


class Numbered(Signs):
    """Keeps a number of each parameter that is no tensor."""

    def update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["calls"] = state.get("calls", 0) + 1
        super().update(parameter, group)


class Periodic(Signs):
    """Divides by the norm of the tensor at every tenth update, counted as Adam does."""

    def update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        scale = parameter.grad.norm() if state["step"] % 10 == 0 else 1.0
        parameter.sub_(group["lr"] * parameter.grad / scale)


class CountingDown(Signs):
    """Divides by the norm of the tensor once its count, all the state that it has, is below zero."""

    def update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        left = self.state[parameter].setdefault("left", torch.tensor(100.0)).sub_(1)
        parameter.sub_(group["lr"] * parameter.grad / (parameter.grad.norm() if left < 0 else 1.0))


class Bare(Signs):
    """Its count is all the state that it has."""

    def update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        step = self.state[parameter].setdefault("step", torch.zeros(())).add_(1)
        parameter.sub_(group["lr"] * parameter.grad / step)


class Late(Signs):
    """Makes state of a parameter at its hundredth update."""

    def update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        step = self.state[parameter].setdefault("step", torch.zeros(())).add_(1)
        if step >= 100:
            super().update(parameter, group)


class Lookahead(torch.optim.SGD):
    """Slow weights follow the fast ones every third update (Zhang et al. 2019), counted in the group."""

    def __init__(self, groups: Iterable[Any], lr: float) -> None:
        super().__init__(groups, lr, momentum=0.9)
        self.norms: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter].setdefault("slow", parameter.detach().clone())
        super().step()
        self.norms = [*self.norms[-1:], self.param_groups[0]["params"][0].norm()]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"] if group["count"] % 3 == 0 else ():
                slow = self.state[parameter]["slow"]
                parameter.copy_(slow.lerp_(parameter, 0.5))


def warm(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / 2) * (1 - step / (2 * steps))


def job(**train: Any) -> dict[str, Any]:
    return session_job(train={"steps": STEPS, "gradient_clip": 0, **train}, checkpoint={"every_steps": 2})


def objects(optimizer: Any, schedule: Any = warm) -> dict[str, Any]:
    return {"model": seeded(sequential), "data": Numbers(), "optimizer": optimizer, "schedule": schedule}


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


PLAN = Plan(micro_batch=7, precision="fp64")


@pytest.mark.parametrize("optimizer", [torch.optim.RAdam, torch.optim.NAdam, Signs])
def test_the_weights_are_those_of_a_plain_loop(optimizer: Any, tmp_path: Path) -> None:
    from wanma.data.datasets.map_dataset import wrap_user_dataset
    from wanma.job.sections.data import DataSection

    run = run_here(tmp_path, job(), PLAN, objects(optimizer))
    model = seeded(sequential).double()
    plain = optimizer(model.parameters(), lr=1e-2)
    data = wrap_user_dataset(Numbers(), DataSection(), 1, 7 * STEPS)
    for step in range(STEPS):
        batch = data.batch(range(7 * step, 7 * step + 7))
        plain.param_groups[0]["lr"] = 1e-2 * warm(step, STEPS)
        plain.zero_grad()
        nn.functional.cross_entropy(model(batch.inputs[0].double()), batch.targets).backward()
        plain.step()
    for name, parameter in model.named_parameters():
        assert torch.allclose(run.tensors()[f"model.{name}"], parameter, rtol=1e-12, atol=1e-14), name


@pytest.mark.parametrize(
    "sizes",
    [{"dp_shard": 2, "shard": "parameters"}, {"dp_shard": 2, "shard": "optimizer"}, {"pp": 2}],
    ids=str,
)
def test_one_that_computes_by_element_runs_on_shards(sizes: dict[str, Any], tmp_path: Path) -> None:
    one = run_here(tmp_path / "one", job(weight_decay=0.1), PLAN, objects(Signs))
    other = run_job(
        tmp_path / "other",
        job(weight_decay=0.1),
        Plan(**sizes, micro_batch=2, precision="fp64"),
        objects(Signs),
    )
    same_numbers(one, other, tolerance=1e-9)


def test_a_run_that_carries_on_is_as_if_never_stopped(tmp_path: Path) -> None:
    named = job(optimizer_factory="torch.optim:NAdam", optimizer_arguments={"momentum_decay": 0.1})
    given = {"model": seeded(Plain), "data": Numbers()}
    whole = run_here(tmp_path / "whole", named, PLAN, given)
    shutil.copytree(whole.directory, tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / f"step-{STEPS:08d}")
    again = run_here(tmp_path / "again", named, PLAN, given)
    same_numbers(whole, again, tolerance=0.0)


def test_state_of_groups_and_of_the_object_carries_on(tmp_path: Path) -> None:
    given = objects(Lookahead)
    whole = run_here(tmp_path / "whole", job(), PLAN, given)
    shutil.copytree(whole.directory, tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / f"step-{STEPS:08d}")
    again = run_here(tmp_path / "again", job(), PLAN, given)
    same_numbers(whole, again, tolerance=0.0)
    state = read_manifest(tmp_path / "again" / "checkpoints" / f"step-{STEPS:08d}").state
    (attributes,) = state["optimizer_attributes"]
    assert attributes["groups.0.count"] == STEPS
    assert len(attributes["norms"]["list"]) == 2


def test_a_count_that_is_all_the_state_carries_on_with_other_shards(tmp_path: Path) -> None:
    given = objects(Bare)
    replicated = Plan(dp_replicate=2, micro_batch=2, precision="fp64")
    whole = run_job(tmp_path / "whole", job(), replicated, given)
    shutil.copytree(whole.directory, tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / f"step-{STEPS:08d}")
    sharded = Plan(dp_shard=2, shard="parameters", micro_batch=2, precision="fp64")
    again = run_job(tmp_path / "again", job(), sharded, given)
    same_numbers(whole, again, tolerance=1e-9)


def own(optimizer: Any) -> UserOptimizer:
    return UserOptimizer(optimizer.__name__, optimizer)


def test_what_an_optimizer_couples_is_found_out() -> None:
    for optimizer in (Signs, torch.optim.RMSprop, torch.optim.Adamax, torch.optim.ASGD, torch.optim.Rprop):
        assert update_scope_of(own(optimizer)) == "elements", optimizer
    assert update_scope_of(own(torch.optim.Adafactor)) == "tensors"
    assert update_scope_of(own(Scaled)) == "tensors"
    assert update_scope_of(own(Clipped)) == "model"
    assert update_scope_of(own(Periodic)) == update_scope_of(own(CountingDown)) == "tensors"
    assert update_scope_of(own(Counting)) == update_scope_of(own(Lookahead)) == "attributes"


@pytest.mark.parametrize(
    ("optimizer", "sizes", "told"),
    [
        (
            Scaled,
            {"dp_shard": 2, "shard": "gradients"},
            "tensors, but parallel.dp_shard = 2 would",
        ),
        (Scaled, {"tp": 2}, "full tensors, but parallel.tp = 2 would"),
        (Clipped, {"pp": 2}, "tensors together, but parallel.pp = 2"),
        (Noisy, {}, "Noisy draws random numbers"),
        (Forgetful, {}, r"Forgetful does not resume exactly from a checkpoint: its class Forgetful\.seen"),
        (Wrapping, {}, "Wrapping does not resume exactly from a checkpoint: its inner changes"),
        (Late, {}, r"Late makes state\[parameter\]\['momentum'\] after its first update"),
        (Numbered, {}, r"Numbered does not resume exactly .*state\[parameter\]\['calls'\]"),
        (Counting, {"dp_shard": 2, "shard": "optimizer"}, r"the complete model.*parallel\.dp_shard = 2"),
        (Counting, {"pp": 2}, r"the complete model.*parallel\.pp = 2"),
        (
            Counting,
            {"dp_replicate": 2, "synchronization": Synchronization("local_sgd", 2, 4)},
            r"the complete model.*parallel\.sites = 2",
        ),
        (torch.optim.LBFGS, {}, r"LBFGS (failed in its step|cannot be built)"),
        (
            lambda groups: torch.optim.SGD([p for g in groups for p in g["params"]]),
            {},
            "has other parameter groups",
        ),
        (lambda groups: groups, {}, r"is a list, not a torch"),
    ],
)
def test_what_no_layout_can_keep_is_refused(optimizer: Any, sizes: dict[str, Any], told: str) -> None:
    with pytest.raises(JobError, match=told):
        try_user_optimizer(own(optimizer), TrainSection(), Plan(**sizes))


def test_replicas_may_look_at_the_whole_model() -> None:
    assert try_user_optimizer(own(Clipped), TrainSection(), Plan(dp_replicate=2)) == "model"
    assert try_user_optimizer(own(Scaled), TrainSection(), Plan(dp_replicate=2, pp=2)) == "tensors"


def test_a_schedule_is_a_function_of_the_step() -> None:
    assert check_schedule(lambda step: 0.5**step, 10)(3) == 0.125
    assert check_schedule(warm, 10)(0) == 0.5
    asked: list[int] = []

    def counting(step: int) -> float:
        asked.append(step)
        return float(len(asked))

    for schedule, told in (
        (counting, "another value for the same step"),
        (lambda step: math.nan * step, "returned nan at step 0"),
        (lambda step: 1 / (step - 1), "ZeroDivisionError|returned -1"),
        (0.1, "schedule is a float"),
    ):
        with pytest.raises(JobError, match=told):
            check_schedule(schedule, 10)


def test_one_that_is_made_already_or_named_twice_is_refused() -> None:
    made = torch.optim.SGD(Plain().parameters())
    for train, optimizer, fact in (
        ({}, made, "a SGD instance"),
        ({"optimizer": "sgd"}, Signs, r"train\.optimizer of the job"),
        ({"schedule": "linear", "schedule_factory": "a:b"}, None, "schedule and schedule_factory"),
    ):
        with pytest.raises(JobError, match=fact):
            wanma.train({"train": train}, model=Plain(), data=Numbers(), optimizer=optimizer)


@pytest.mark.parametrize(
    "value",
    [3, -0.1, math.inf, "text", None, True, [1, (2, {"a": [0.5]})], {0: "x"}, torch.tensor([1.5, math.nan])],
    ids=str,
)
def test_attributes_have_a_form_that_a_manifest_keeps(value: Any) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer, other = (torch.optim.SGD([parameter]) for _ in range(2))
    optimizer.kept, optimizer.param_groups[0]["kept"] = value, [parameter, value]  # type: ignore[attr-defined]
    forms = json.loads(json.dumps(read_attributes(optimizer), allow_nan=False))
    write_attributes(other, {path: form for path, form in forms.items() if path.endswith("kept")})
    assert read_attributes(other) == forms
    assert other.param_groups[0]["kept"][0] is parameter
    assert type(other.kept) is type(value)  # type: ignore[attr-defined]
