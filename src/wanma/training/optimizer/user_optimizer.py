"""User's optimizers and schedules: made by a factory, examined on small tensors before the first step.

The coupling of an optimizer decides where it may run. One that computes element by element updates any shard;
one that reads full tensors, or several, must have them complete.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wanma.job.errors import JobError, WanmaError
from wanma.job.file.import_path import import_object
from wanma.job.plan.plan import Plan
from wanma.job.sections.train import TrainSection
from wanma.job.user_frames import user_frame_text
from wanma.training.optimizer.optimizer_attributes import changed_attributes, read_attributes

UpdateScope = Literal["elements", "tensors", "model", "attributes"]
"""Scope that one element's update depends on: itself alone, its complete tensor, or other tensors too.

"attributes": it may depend on state of the groups or of the object, such as a count, at any later update.
Each rank must then have the complete model, and make the same updates.
"""
LearningRateSchedule = Callable[[int], float]
"""Function: optimizer step (from 0) -> share of `train.learning_rate`."""

_CLOSE = 1e-5
_LATE_UPDATE = 14_414_400
"""Update that most periods divide (2^6 · 3^2 · 5^2 · 7 · 11 · 13); fp32 still counts so far."""


@dataclass(frozen=True)
class UserOptimizer:
    """User's optimizer, by its factory.

    Attributes:
        name: name of the factory for messages.
        factory: function (parameter groups, keyword arguments) -> optimizer.
        arguments: keyword arguments of the factory.
    """

    name: str
    factory: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, groups: list[dict[str, Any]], learning_rate: float) -> Optimizer:
        """Make the optimizer of some groups, each of which has its `lr`.

        Raises:
            JobError: the factory fails, or does not take the groups as they are.
        """
        arguments = dict(self.arguments)
        if "lr" not in arguments and "lr" in _parameters(self.factory):
            arguments["lr"] = learning_rate
        try:
            optimizer = self.factory(groups, **arguments)
        except WanmaError:
            raise
        except Exception as error:  # whatever the user's code raises
            raise JobError(
                f"the optimizer {self.name} cannot be built: {type(error).__name__}: {error}{_line(error)}",
                "check its arguments: wanma calls it with parameter groups, as torch's optimizers, "
                "and optimizer_arguments",
            ) from error
        if not isinstance(optimizer, Optimizer):
            raise JobError(
                f"the optimizer {self.name} is a {type(optimizer).__name__}, not a torch.optim.Optimizer",
                "return a torch.optim.Optimizer of the groups that the factory receives",
            )
        if [g["params"] for g in optimizer.param_groups] != [g["params"] for g in groups] or not all(
            "learning_rate_scale" in group for group in optimizer.param_groups
        ):
            raise JobError(
                f"the optimizer {self.name} has other parameter groups than the factory received",
                "pass the groups on unchanged, e.g. lambda groups: torch.optim.RAdam(groups); set "
                "learning rates and weight decay of single parameters in train.parameter_groups",
            )
        return optimizer


@dataclass(frozen=True)
class UserOptimization:
    """Optimizer and schedule that the user has given; None: the job's own."""

    optimizer: UserOptimizer | None = None
    schedule: LearningRateSchedule | None = None
    schedule_function: Any = None
    """Function (step) or (step, steps) behind `schedule`, as the user has written it."""


NO_USER_OPTIMIZATION = UserOptimization()
"""Optimizer and schedule of a job without the user's own."""


def load_user_optimization(train: TrainSection, user_objects: Mapping[str, Any]) -> UserOptimization:
    """Return the optimizer and the schedule that the user passed or the job names.

    Raises:
        JobError: one cannot be imported or called, or is given twice.
    """
    factory, name = user_objects.get("optimizer"), ""
    if factory is None and train.optimizer_factory is not None:
        factory, name = (
            import_object(train.optimizer_factory, "train.optimizer_factory"),
            train.optimizer_factory,
        )
    schedule = user_objects.get("schedule")
    if schedule is None and train.schedule_factory is not None:
        schedule = import_object(train.schedule_factory, "train.schedule_factory")
    optimizer = None
    if factory is not None:
        check_optimizer_factory(factory)
        name = name or str(getattr(factory, "__qualname__", type(factory).__qualname__))
        optimizer = UserOptimizer(name, factory, train.optimizer_arguments)
    checked = None if schedule is None else check_schedule(schedule, train.steps)
    return UserOptimization(optimizer, checked, schedule)


def check_optimizer_factory(factory: object) -> None:
    """Refuse an object that is no factory of an optimizer.

    Raises:
        JobError: it is an optimizer already, or cannot be called.
    """
    if isinstance(factory, Optimizer):
        raise JobError(
            f"optimizer is a {type(factory).__name__} instance, built before its parameters are sharded",
            "pass a function of the parameter groups: optimizer=lambda groups: torch.optim.RAdam(groups)",
        )
    if not callable(factory):
        raise JobError(
            f"optimizer is a {type(factory).__name__}, which cannot be called",
            "pass a function or class that builds a torch.optim.Optimizer from parameter groups",
        )


def check_schedule(schedule: object, steps: int) -> LearningRateSchedule:
    """Return a schedule as a function of the step alone.

    Raises:
        JobError: it is no schedule, or its result depends on earlier calls.
    """
    kind = schedule if isinstance(schedule, type) else type(schedule)
    if not callable(schedule) or issubclass(kind, torch.optim.lr_scheduler.LRScheduler):
        raise JobError(
            f"schedule is a {kind.__name__}",
            "pass a function (step) or (step, steps) -> factor on train.learning_rate, as for LambdaLR; "
            "it must not depend on earlier calls, because a resumed run starts at its step",
        )
    takes_steps = len(_parameters(schedule)) > 1

    def share(step: int) -> float:
        try:
            value = float(schedule(step, steps) if takes_steps else schedule(step))
        except Exception as error:  # whatever the user's code raises
            raise JobError(
                f"the schedule failed at step {step}: {type(error).__name__}: {error}{_line(error)}"
            ) from error
        if not 0 <= value < math.inf:
            raise JobError(f"the schedule returned {value} at step {step}", "return a factor of 0 or more")
        return value

    looked_at = sorted({0, 1, steps // 2, steps - 1} & set(range(steps)))
    first_pass = {step: share(step) for step in looked_at}
    second_pass = {step: share(step) for step in reversed(looked_at)}
    if first_pass != second_pass:
        raise JobError(
            "the schedule returns another value for the same step when it is called again",
            "compute it from the step alone: a resumed run calls it only for its own steps",
        )
    return share


def refuse_split_tensors(optimizer: UserOptimizer, scope: UpdateScope, plan: Plan) -> None:
    """Refuse a plan that splits tensors which the optimizer needs in full.

    Raises:
        JobError: it names the mesh dimension.
    """
    if scope == "elements":
        return
    axes = [axis for axis in ("dp_shard", "cp", "tp", "ep") if getattr(plan, axis) > 1]
    requirement = "full tensors"
    if plan.shard_group_size == plan.tp == plan.ep == 1:
        axes = []
    if scope in ("model", "attributes"):
        requirement = (
            "several tensors together"
            if scope == "model"
            else "the complete model, as state of its groups or of the object changes with each update"
        )
        axes += ["pp"] if plan.pp > 1 else []
        axes += ["sites"] if plan.sites > 1 and scope == "attributes" else []
        if not axes and plan.offload_optimizer != "none":
            raise JobError(
                f"the optimizer {optimizer.name} needs {requirement}, but parallel.offload_optimizer = "
                f"'{plan.offload_optimizer}' updates them one after another",
                "unset parallel.offload_optimizer",
            )
    if axes:
        cut = " and ".join(f"parallel.{axis} = {getattr(plan, axis)}" for axis in axes)
        raise JobError(
            f"the optimizer {optimizer.name} needs {requirement}, but {cut} would split them",
            "use dp_replicate, or an element-wise optimizer",
        )


def update_scope_of(optimizer: UserOptimizer) -> UpdateScope:
    """Determine on small tensors which elements the optimizer couples.

    Raises:
        JobError: it fails, draws random numbers, which would differ between ranks, or makes state after its
            first update, which a load from a checkpoint would not have a place for.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = ((32, 16), (16, 12))
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    scales = (1.0, 30.0, 0.1, 3.0, 100.0, 0.5)  # unlike steps reveal couplings that signs and ratios hide
    gradients = [[torch.randn(shape, generator=generator) * s for shape in shapes] for s in scales]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        try:
            joint, changes_attributes = _updated(optimizer, values, gradients)
        except _LateUpdateError:
            return "model"  # nobody knows what it couples then
        torch.manual_seed(2)
        repeated, _ = _updated(optimizer, values, gradients)
        if not _same(joint, repeated):
            raise JobError(
                f"the optimizer {optimizer.name} draws random numbers, which would differ between ranks",
                "use an optimizer without random numbers",
            )
        if changes_attributes:
            return "attributes"
        separate = [
            _updated(optimizer, [value], [[step[index]] for step in gradients])[0][0]
            for index, value in enumerate(values)
        ]
        if not _same(joint, separate):
            return "model"
        for cut in (0, 1):
            halves = [half for value in values for half in value.tensor_split(2, dim=cut)]
            half_gradients = [
                [half for g in step for half in g.tensor_split(2, dim=cut)] for step in gradients
            ]
            parts, _ = _updated(optimizer, halves, half_gradients)
            joined = [torch.cat(parts[2 * n : 2 * n + 2], dim=cut + 1) for n in range(len(values))]
            if not _same(joint, joined):
                return "tensors"
    return "elements"


class _LateUpdateError(Exception):
    """An update fails whose count is large."""


def _updated(
    optimizer: UserOptimizer, values: list[Tensor], gradients: list[list[Tensor]]
) -> tuple[list[Tensor], bool]:
    """Update `values` by each of `gradients`, twice: the first time, and at `_LATE_UPDATE`.

    An optimizer may couple elements after a warm-up, or at every so many updates.

    Returns:
        each value after both, stacked; and whether attributes of the optimizer have changed.
    """
    parameters = [nn.Parameter(value.clone()) for value in values]
    torch_optimizer = optimizer([{"params": parameters, "lr": 0.01, "learning_rate_scale": 1.0}], 0.01)
    attributes = read_attributes(torch_optimizer)

    counts: list[dict[tuple[int, Any], float]] = []

    def update() -> list[Tensor]:
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.clone()
            step_optimizer(optimizer.name, torch_optimizer)
            counts.append(_single_numbers(torch_optimizer))
        return [parameter.detach().clone() for parameter in parameters]

    early = update()
    first_keys = {key for state in torch_optimizer.state.values() for key in state}
    changes_attributes = bool(changed_attributes(attributes, read_attributes(torch_optimizer)))
    _advance_counts(torch_optimizer, counts, _LATE_UPDATE - 1 - len(gradients))
    try:
        late = update()
    except JobError as error:
        raise _LateUpdateError from error
    late_keys = {key for state in torch_optimizer.state.values() for key in state} - first_keys
    if late_keys:
        raise JobError(
            f"the optimizer {optimizer.name} makes state[parameter][{min(late_keys, key=str)!r}] after its "
            "first update, so that it could not resume from a checkpoint",
            "make all state of a parameter in its first update, for example as zeros",
        )
    return [torch.stack(pair) for pair in zip(early, late, strict=True)], changes_attributes


def _single_numbers(optimizer: Optimizer) -> dict[tuple[int, Any], float]:
    """Return the state that is one number, by the index of its parameter and its key."""
    return {
        (index, key): float(value)
        for index, state in enumerate(optimizer.state.values())
        for key, value in state.items()
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    }


def _advance_counts(optimizer: Optimizer, history: list[dict[tuple[int, Any], float]], updates: int) -> None:
    """Set each number that changes by the same amount with every update to its value so many updates later.

    Args:
        optimizer: it has made at least three updates.
        history: `_single_numbers` after each update.
        updates: number of updates to skip.
    """
    for index, state in enumerate(optimizer.state.values()):
        for key, value in state.items():
            first, second, last = (numbers.get((index, key), math.nan) for numbers in history[-3:])
            if last - second == second - first != 0:
                later = last + (last - second) * updates
                if isinstance(value, Tensor):
                    value.fill_(later)
                else:
                    state[key] = type(value)(later)


def step_optimizer(name: str, optimizer: Optimizer) -> None:
    """Make one update.

    Raises:
        JobError: the user's code fails.
    """
    try:
        optimizer.step()
    except WanmaError:
        raise
    except Exception as error:  # whatever the user's code raises
        needs_closure = "closure" in str(error)
        raise JobError(
            f"the optimizer {name} failed in its step: {type(error).__name__}: {error}{_line(error)}",
            (
                "use an optimizer without a closure: a step has one forward and backward pass, so "
                "optimizers such as LBFGS are not supported"
            )
            if needs_closure
            else "fix the optimizer: wanma calls optimizer.step() with the gradients set",
        ) from error


def _same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(
        torch.allclose(left_tensor, right_tensor, rtol=_CLOSE, atol=1e-7, equal_nan=True)
        for left_tensor, right_tensor in zip(left, right, strict=True)
    )


def _parameters(function: Any) -> list[str]:
    """Return the names of a callable's parameters; none where they cannot be read."""
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def _line(error: BaseException) -> str:
    line = user_frame_text(error)
    return f"\n    {line}" if line else ""
