"""Hooks on parameters act as in a plain loop over the global batch, on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wanma
from support.compare import full_tensor, spread_over
from support.own import Numbers, Plain, seeded
from support.own_loop import per_sample, session_job, started_by_launch
from support.ranks import run_ranks
from wanma.job.errors import WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.models.user_modules.parameter_hooks import collect_hooks, register_hooks

RATE = 0.1


class Hooked(Plain):
    """None of its hooks is linear, so that each must see the gradient of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3) + 1e-3)
        self.last.weight.register_post_accumulate_grad_hook(only_the_sign)
        self.last.bias.register_hook(torch.zeros_like).remove()


def only_the_sign(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.sign_().mul_(1e-2)


def hook_more(model: nn.Module) -> None:
    """User's hooks on the module that `prepare` returns."""
    model.get_parameter("first.bias").register_hook(lambda gradient: gradient.square())
    model.get_parameter("last.weight").register_post_accumulate_grad_hook(only_the_sign)


def job(**parallel: Any) -> dict[str, Any]:
    train = {"optimizer": "sgd", "learning_rate": RATE, "momentum": 0.0, "weight_decay": 0.0}
    train |= {"gradient_clip": 0.0, "schedule": "constant", "steps": 3}
    return session_job(train=train, parallel=parallel)


def weights(worker: WorkerContext, text: dict[str, Any], folder: Path) -> tuple[dict[str, Any], list[Any]]:
    """Gradients of a run, and the inputs and targets of each of this rank's micro-batches."""
    seen = []
    with started_by_launch(worker, folder), wanma.session(text) as session:
        model = session.prepare(seeded(Hooked))
        hook_more(model)
        for batch in session.batches(Numbers()):
            seen.append((batch.inputs[0].tolist(), batch.targets.tolist()))
            session.step(per_sample(model, batch))
        whole = {name: full_tensor(parameter).tolist() for name, parameter in model.named_parameters()}
    return whole, seen


def plain_loop(steps: list[Any]) -> dict[str, Tensor]:
    model = seeded(Hooked).double()
    hook_more(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for inputs, targets in steps:
        optimizer.zero_grad()
        F.cross_entropy(model(torch.tensor(inputs).double()), torch.tensor(targets)).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {"micro_batch": 2}),
    "replicas": (2, {"dp_replicate": 2}),
    "ZeRO 2": (2, {"dp_shard": 2, "shard": "gradients", "micro_batch": 2}),
    "ZeRO 3": (2, {"dp_shard": 2, "shard": "parameters", "micro_batch": 2}),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.daily("replicas", "ZeRO 3")
def test_hooks_see_the_gradient_of_the_global_batch(name: str, tmp_path: Path) -> None:
    ranks, parallel = LAYOUTS[name]
    (_, steps), *_ = run_ranks(weights, 1, (job(micro_batch=7), tmp_path / "one"))
    expected = plain_loop(steps)
    for found, _ in run_ranks(weights, ranks, (job(**parallel), tmp_path / "many")):
        for key, value in expected.items():
            got = torch.tensor(found[key], dtype=value.dtype)
            torch.testing.assert_close(got, value, rtol=0, atol=1e-12, msg=lambda m, k=key: f"{k}: {m}")


def test_hooks_travel_with_the_module(tmp_path: Path) -> None:
    text = job(micro_batch=2)
    model = Plain()
    model.first.weight.register_hook(torch.zeros_like)
    before = model.first.weight.detach().clone()
    wanma.train(text, model=model, data=Numbers(), run_directory=tmp_path / "run")
    assert torch.equal(model.first.weight, before)


def test_hooks_of_a_parameter_that_was_frozen_afterwards_travel_too() -> None:
    model, other = Plain(), Plain()
    model.first.weight.register_hook(torch.zeros_like)
    model.first.weight.register_post_accumulate_grad_hook(only_the_sign)
    other.first.weight.requires_grad_(False)
    register_hooks(other, collect_hooks(model))
    assert collect_hooks(other) == collect_hooks(model)
    assert not other.first.weight.requires_grad


def steps_itself(parameter: Tensor) -> None:
    """An optimizer within backward."""
    assert parameter.grad is not None
    with torch.no_grad():
        parameter -= RATE * parameter.grad


def stepping(worker: WorkerContext, folder: Path) -> str:
    with started_by_launch(worker, folder), wanma.session(job()) as session:
        model = session.prepare(seeded(Plain))
        model.get_parameter("last.weight").register_post_accumulate_grad_hook(steps_itself)
        try:
            for batch in session.batches(Numbers()):
                session.step(per_sample(model, batch))
        except WanmaError as error:
            return error.message
    return ""


def test_a_hook_that_updates_the_parameter_is_refused_by_name(tmp_path: Path) -> None:
    (message,) = run_ranks(stepping, 1, (tmp_path / "run",))
    assert message.startswith("a gradient hook on last.weight changes the parameter itself")


class HooksAsItComputes(Plain):
    def forward(self, x: Tensor) -> Tensor:
        self.first.weight.register_hook(torch.sign)
        return super().forward(x)


@pytest.mark.parametrize("plan", [Plan(micro_batch=4), Plan(dp_shard=2, shard="parameters", micro_batch=4)])
def test_a_hook_that_a_forward_registers_is_refused_by_name(plan: Plan, tmp_path: Path) -> None:
    text = {**job(), "model": {"factory": "any:thing"}, "data": {"cache": str(tmp_path / "cache")}}
    with pytest.raises(AssertionError, match=r"first\.weight: a forward pass"):
        spread_over(tmp_path, text, plan, objects={"model": HooksAsItComputes(), "data": Numbers()})
