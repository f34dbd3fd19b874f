"""A job whose every step takes the whole dataset, and the same training as a plain PyTorch loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.compare import spread_over
from support.own_loop import session_job
from wanma.job.plan.plan import Plan

RATE = 1e-2
ROWS = 8


def full_batch_job(steps: int, **train: Any) -> dict[str, Any]:
    """`steps` steps of AdamW in fp64, each over all of a dataset of `ROWS` rows."""
    keys = {"steps": steps, "global_batch": ROWS, "learning_rate": RATE, "schedule": "constant"}
    keys |= {"gradient_clip": 0.0, "weight_decay": 0.1, "validation_samples": 2, **train}
    return session_job(train=keys)


def trained(folder: Path, job: dict[str, Any], plan: Plan, model: nn.Module, data: Any) -> dict[str, Tensor]:
    """The weights after `job`."""
    outcome = spread_over(folder, job, plan, objects={"model": model, "data": (data, data)})
    return {
        name.removeprefix("model."): tensor
        for name, tensor in outcome.tensors().items()
        if name.startswith("model.")
    }


def plain_loop(
    model: nn.Module,
    data: Any,
    steps: int,
    optimizers: Callable[[nn.Module], Sequence[torch.optim.Optimizer]],
    before_step: Callable[[nn.Module, int], None] = lambda _model, _step: None,
) -> dict[str, Tensor]:
    """The weights after `steps` steps of a loop as anybody writes it."""
    model = copy.deepcopy(model).double().train()
    rules = optimizers(model)
    inputs = torch.stack([torch.as_tensor(data[row][0]) for row in range(len(data))])
    targets = torch.stack([torch.as_tensor(data[row][1]) for row in range(len(data))])
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    for step in range(steps):
        before_step(model, step)
        for rule in rules:
            rule.zero_grad()
        logits = model(inputs)
        F.cross_entropy(logits.flatten(0, -2), targets.flatten()).backward()
        for rule in rules:
            rule.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def adamw(parameters: Any, weight_decay: float = 0.1) -> torch.optim.AdamW:
    """With the settings of a job."""
    return torch.optim.AdamW(parameters, RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay)


def largest_error(expected: dict[str, Tensor], got: dict[str, Tensor]) -> float:
    return max(float((got[name].double() - tensor.double()).abs().max()) for name, tensor in expected.items())
