"""Memory that a step keeps while it runs."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from wanma.data.batch import Batch
from wanma.job.plan.plan import Plan
from wanma.models.keyed_random.forward_draws import RandomDraws
from wanma.parallel.profiling.compute_timer import ComputeTimer
from wanma.training.loss.loss_functions import CrossEntropy
from wanma.training.step.forward_backward import ForwardBackward


def test_the_logits_are_gone_when_backward_has_left_the_head() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 5))
    seen: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    def loss(output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        seen.append(weakref.ref(output.untyped_storage()))
        return CrossEntropy(classes_last=True)(output, batch)

    # The first layer's gradient comes after the head's.
    model[0].weight.register_hook(lambda _: alive.append(seen[-1]() is not None))
    parallel = SimpleNamespace(
        module=model,
        pipeline=None,
        modules=model.modules,
        forward_parameters=model.parameters,
        compute_timer=ComputeTimer(None, lambda: 0.0, per_micro_batch=False),
        begin_micro_batch=lambda **_: None,
        finalize_gradients=lambda: None,
        random_draws=RandomDraws(0),
    )
    plan = Plan(micro_batch=2)
    grid = SimpleNamespace(plan=plan, rank=0, device=torch.device("cpu"), contributes_loss=True)
    step = ForwardBackward(parallel, plan, grid, loss)  # type: ignore[arg-type]  # what it uses of them
    batches = [
        Batch(
            inputs=(torch.randn(2, 4),),
            targets=torch.tensor([1, 4]),
            samples=torch.arange(2),
            real=torch.tensor([True, True]),
        )
        for _ in range(2)
    ]
    _, targets = step(batches, 0.25)
    assert targets.item() == 4
    assert alive == [False, False]
