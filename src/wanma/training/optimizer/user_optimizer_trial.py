"""Trial of a user's optimizer before the first step: supported layouts, and exact continuation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan
from wanma.job.sections.train import TrainSection
from wanma.training.optimizer.named_optimizer import NamedOptimizer, ParameterRule
from wanma.training.optimizer.optimizer_attributes import MAX_TENSOR_ELEMENTS, is_recorded, value_form
from wanma.training.optimizer.user_optimizer import (
    UpdateScope,
    UserOptimization,
    UserOptimizer,
    load_user_optimization,
    refuse_split_tensors,
    update_scope_of,
)

_STEPS = 4
"""Number of updates before and after a checkpoint."""


def load_tried_user_optimization(
    train: TrainSection, user_objects: Mapping[str, Any], plan: Plan
) -> UserOptimization:
    """Return the user's optimizer and schedule, if there are any, after a trial under the plan.

    Raises:
        JobError: one cannot be used (`load_user_optimization`, `try_user_optimizer`).
    """
    user_optimization = load_user_optimization(train, user_objects)
    if user_optimization.optimizer is not None:
        try_user_optimizer(user_optimization.optimizer, train, plan)
    return user_optimization


def try_user_optimizer(user_optimizer: UserOptimizer, train: TrainSection, plan: Plan) -> UpdateScope:
    """Examine an optimizer on small tensors.

    Returns:
        the scope that one element's update depends on.

    Raises:
        JobError: it fails, cannot run under the plan, or keeps state that no checkpoint has.
    """
    reach = update_scope_of(user_optimizer)
    refuse_split_tensors(user_optimizer, reach, plan)
    generator = torch.Generator().manual_seed(1)
    gradients = torch.randn(2 * _STEPS, 4, 3, generator=generator)
    unbroken_trial = _Trial(user_optimizer, train, torch.randn(4, 3, generator=generator))
    unbroken_trial.run(gradients[:_STEPS])
    optimizer = unbroken_trial.named_optimizer
    updates, value = optimizer.update_count, unbroken_trial.parameter.detach().clone()
    saved = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    attributes = optimizer.attribute_state()
    for path, content in (entry for one in attributes for entry in one.items()):
        if not is_recorded(path, content):
            raise _state_not_restored_error(user_optimizer, f"its {path} changes, which no checkpoint keeps")
    unbroken_trial.run(gradients[_STEPS:])

    resumed_trial = _Trial(user_optimizer, train, value)
    resumed_trial.named_optimizer.allocate_state(saved)
    resumed_trial.parameter.data.copy_(value)
    resumed_state = resumed_trial.named_optimizer.state_tensors()
    if resumed_state.keys() != saved.keys() or any(
        resumed_state[name].shape != saved[name].shape for name in saved
    ):
        raise _state_not_restored_error(user_optimizer, "its first update makes other state than later ones")
    for name, tensor in resumed_state.items():
        tensor.copy_(saved[name])
    resumed_trial.named_optimizer.update_count = updates
    resumed_trial.named_optimizer.restore_attribute_state(attributes)
    resumed_trial.run(gradients[_STEPS:])
    before, after = unbroken_trial.state_forms(), resumed_trial.state_forms()
    if different := [name for name in before if after.get(name) != before[name]]:
        raise _state_not_restored_error(user_optimizer, f"its {different[0]} has another value then")
    if not torch.equal(unbroken_trial.parameter, resumed_trial.parameter):
        raise _state_not_restored_error(user_optimizer, "it updates a parameter otherwise then")
    return reach


class _Trial:
    """Small matrix and its updates by the optimizer."""

    def __init__(self, user_optimizer: UserOptimizer, train: TrainSection, value: Tensor) -> None:
        self.parameter = nn.Parameter(value.clone())
        rules = {"weight": ParameterRule(1.0, None)}
        self.named_optimizer = NamedOptimizer(
            {"weight": self.parameter}, rules, train, user_optimizer=user_optimizer
        )

    def run(self, gradients: Tensor) -> None:
        for gradient in gradients:
            self.parameter.grad = gradient.clone()
            self.named_optimizer.step(0.01)
            self.named_optimizer.zero_gradients()

    def state_forms(self) -> dict[str, Any]:
        """Return comparable forms of all state, by name."""
        entries = self.named_optimizer.state_entries()
        forms = {f"state[parameter][{key!r}]": value_form(value) for _, key, value in entries}
        for attributes in self.named_optimizer.attribute_state():
            forms |= attributes
        return forms


def _state_not_restored_error(user_optimizer: UserOptimizer, cause: str) -> JobError:
    return JobError(
        f"the optimizer {user_optimizer.name} does not resume exactly from a checkpoint: {cause}",
        'keep state of a parameter in self.state[parameter] as tensors, its update count in state["step"]; '
        "other state in the groups or in attributes, as numbers, texts, lists, dictionaries or tensors of at "
        f"most {MAX_TENSOR_ELEMENTS} elements",
    )
