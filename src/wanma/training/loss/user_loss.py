"""Preparation of a user's loss for a rank, and refusal of one that would train or keep state by itself."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from inspect import signature
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from wanma.job.errors import JobError, WanmaError
from wanma.torch_internals.autograd import version_counter
from wanma.training.loss.foreign_weights import FREEZE_HINT, MOVE_INTO_MODEL_HINT

_MOVE_INTO_MODEL_HINT = f"{MOVE_INTO_MODEL_HINT}; then loss=lambda output, targets: output"


def check_loss(loss: object) -> None:
    """Refuse an object that is no loss.

    Raises:
        JobError: a class, something that cannot be called, a loss of torch that reduces, or a module with
            parameters to train.
    """
    if isinstance(loss, type):
        raise JobError(
            f"the loss is the class {loss.__name__}, but wanma calls a loss with (output, targets)",
            f"pass an instance, such as {loss.__name__}(reduction='none')",
        )
    if not callable(loss):
        raise JobError(
            f"the loss is a {type(loss).__name__}, which cannot be called",
            "pass a function (output, targets) -> one loss per target",
        )
    _refuse_torch_mean(loss)
    if isinstance(loss, nn.Module):
        trained = [name for name, parameter in loss.named_parameters() if parameter.requires_grad]
        if trained:
            raise JobError(
                f"the loss {type(loss).__name__} has trainable parameters, such as {trained[0]}, but "
                "wanma trains only parameters of the model",
                f"{_MOVE_INTO_MODEL_HINT}. For parameters that must not be trained: call "
                "loss.requires_grad_(False)",
            )


def _refuse_torch_mean(loss: Any) -> None:
    """Refuse losses of torch as they are by default; others are refused once a rank has seen their value."""
    if type(loss).__module__ == nn.CrossEntropyLoss.__module__:
        name, way_out = type(loss).__name__, f"{type(loss).__name__}(..., reduction='none')"
        reduces = getattr(loss, "reduction", "none") != "none"
    else:
        name = getattr(loss, "__name__", "")
        way_out = f"functools.partial(F.{name}, reduction='none')"
        is_of_torch = loss is getattr(functional, name, None) and isinstance(loss, FunctionType)
        reduces = is_of_torch and "reduction" in signature(loss).parameters
    if reduces:
        raise JobError(
            f"the loss {name} returns one mean, but wanma needs one loss per target: it divides their sum "
            "once, by the target count of the global batch",
            f"pass {way_out}",
        )


def prepare_loss(loss: Any, model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Prepare the loss on a rank's device.

    Gradients that reach weights which only the loss holds are an error in the first backward, before any
    update; so is a module whose buffers change in its first forward.

    Args:
        loss: user's loss.
        model: module that is trained.
        device: device of this rank.
        dtype: the job's precision, if wider than that of the user's program.

    Raises:
        JobError: the object is no loss (`check_loss`).
    """
    check_loss(loss)
    if isinstance(loss, nn.Module):
        loss.to(device, dtype)
    model_parameters = {id(parameter) for parameter in model.parameters()}
    refuse = functools.partial(_refuse_gradient, _loss_name(loss))
    for weight in _held_weights(loss, set()):
        if weight.requires_grad and weight.is_leaf and id(weight) not in model_parameters:
            weight.register_post_accumulate_grad_hook(refuse)
    return (
        _BufferCheckedLoss(loss)
        if isinstance(loss, nn.Module) and any(True for _ in loss.buffers())
        else loss
    )


class _BufferCheckedLoss:
    """Loss with buffers that must not change in its first call."""

    def __init__(self, loss: nn.Module) -> None:
        self._loss = loss
        self.ignore_index = getattr(loss, "ignore_index", None)
        self._is_checked = False

    def __call__(self, output: Any, targets: Any) -> Any:
        if self._is_checked:
            return self._loss(output, targets)
        before = {name: (buffer, version_counter(buffer)) for name, buffer in self._loss.named_buffers()}
        losses = self._loss(output, targets)
        for name, buffer in self._loss.named_buffers():
            old_buffer, version = before.get(name, (None, 0))
            if buffer is not old_buffer or version_counter(buffer) != version:
                raise WanmaError(
                    f"the loss {_loss_name(self._loss)} changes its buffer {name} in its forward pass: "
                    "each rank would hold another value, from its own micro-batches, and checkpoints do "
                    "not include it",
                    _MOVE_INTO_MODEL_HINT,
                )
        self._is_checked = True
        return losses


def _refuse_gradient(name: str, _: Tensor) -> None:
    raise WanmaError(
        f"the loss {name} holds weights with a gradient that are not part of the model, but wanma trains "
        "only weights of the model",
        f"{_MOVE_INTO_MODEL_HINT}. {FREEZE_HINT}",
    )


def _held_weights(holder: Any, visited: set[int]) -> Iterator[Tensor]:
    """Yield the parameters and tensors that a function, a bound method or an object holds."""
    if id(holder) in visited:
        return
    visited.add(id(holder))
    if isinstance(holder, nn.Module):
        yield from holder.parameters()
    elif isinstance(holder, Tensor):
        yield holder
    elif isinstance(holder, functools.partial):
        for part in (holder.func, *holder.args, *holder.keywords.values()):
            yield from _held_weights(part, visited)
    elif isinstance(holder, MethodType):
        yield from _held_weights(holder.__self__, visited)
    elif isinstance(holder, FunctionType):
        for cell in holder.__closure__ or ():
            try:
                yield from _held_weights(cell.cell_contents, visited)
            except ValueError:  # not yet filled
                continue
        for name in holder.__code__.co_names:
            if isinstance(value := holder.__globals__.get(name), nn.Module | Tensor):
                yield from _held_weights(value, visited)
    elif isinstance(holder, list | tuple):
        for part in holder:
            yield from _held_weights(part, visited)
    elif isinstance(holder, dict):
        for part in holder.values():
            yield from _held_weights(part, visited)
    elif callable(holder) and not isinstance(holder, type):
        yield from _held_weights(getattr(holder, "__dict__", {}), visited)


def _loss_name(loss: Any) -> str:
    return str(getattr(loss, "__qualname__", type(loss).__qualname__))
