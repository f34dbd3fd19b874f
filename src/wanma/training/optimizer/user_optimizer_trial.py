"""Trial of a user's optimizer before the first step: supported layouts, and exact continuation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import TrainSection
from wanma.training.optimizer.named_optimizer import GroupRule, Updater
from wanma.training.optimizer.user_optimizer import (
    OwnOptimizer,
    OwnUpdate,
    Reach,
    own_update,
    reach_of,
    refuse_split,
)

_STEPS = 2
"""Number of updates before and after a checkpoint."""


def tried_update(train: TrainSection, objects: Mapping[str, Any], plan: Plan) -> OwnUpdate:
    """Return the user's optimizer and schedule, if there are any, after a trial under the plan.

    Raises:
        JobError: one cannot be used (`own_update`, `try_optimizer`).
    """
    own = own_update(train, objects)
    if own.optimizer is not None:
        try_optimizer(own.optimizer, train, plan)
    return own


def try_optimizer(own: OwnOptimizer, train: TrainSection, plan: Plan) -> Reach:
    """Examine an optimizer on small tensors.

    Returns:
        the scope that one element's update depends on.

    Raises:
        JobError: it fails, cannot run under the plan, or keeps state that no checkpoint has.
    """
    reach = reach_of(own)
    refuse_split(own, reach, plan)
    generator = torch.Generator().manual_seed(1)
    gradients = torch.randn(2 * _STEPS, 4, 3, generator=generator)
    whole = _Trial(own, train, torch.randn(4, 3, generator=generator))
    whole.run(gradients[:_STEPS])
    updates, value = whole.updater.updates, whole.parameter.detach().clone()
    saved = {name: tensor.clone() for name, tensor in whole.updater.state_tensors().items()}
    whole.run(gradients[_STEPS:])

    again = _Trial(own, train, value)
    again.updater.allocate_state(saved)
    again.parameter.data.copy_(value)
    here = again.updater.state_tensors()
    if here.keys() != saved.keys() or any(here[name].shape != saved[name].shape for name in saved):
        raise _not_kept(own)
    for name, tensor in here.items():
        tensor.copy_(saved[name])
    again.updater.updates = updates
    again.run(gradients[_STEPS:])
    if not torch.equal(whole.parameter, again.parameter):
        raise _not_kept(own)
    return reach


class _Trial:
    """Small matrix and its updates by the optimizer."""

    def __init__(self, own: OwnOptimizer, train: TrainSection, value: Tensor) -> None:
        self.parameter = nn.Parameter(value.clone())
        rules = {"weight": GroupRule(1.0, None)}
        self.updater = Updater({"weight": self.parameter}, rules, train, own=own)

    def run(self, gradients: Tensor) -> None:
        for gradient in gradients:
            self.parameter.grad = gradient.clone()
            self.updater.step(0.01)
            self.updater.zero_gradients()


def _not_kept(own: OwnOptimizer) -> JobError:
    return JobError(
        f"the optimizer {own.name} does not carry on from a checkpoint as if it had not been stopped: it "
        "keeps something that is no tensor in the state of a parameter",
        'keep all of it in self.state[parameter], as tensors; a count of updates as state["step"]',
    )
