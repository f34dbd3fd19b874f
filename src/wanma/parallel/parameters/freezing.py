"""Freezing and releasing of parameters while a model trains, as plain torch has it: by `requires_grad`.

A module computes with other tensors than those that are its state between steps. A model that freezes or
releases parameters in its forward changes the first, a loop between two steps the second; each must follow
the other. Parameters that the job itself freezes stay frozen: they have no state to be trained with.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from wanma.job.errors import WanmaError
from wanma.parallel.parameters.fsdp_units import fsdp_units
from wanma.torch_internals.fsdp import (
    FsdpParameter,
    FsdpParameterGroup,
    choose_gradient_dtype,
    parameter_group,
    unsharded_or_none,
)
from wanma.torch_internals.uncompiled import uncompiled

LOW_PRECISION_DTYPES = (torch.bfloat16, torch.float16)


def freeze_permanently(model: nn.Module, is_frozen: Any) -> frozenset[str]:
    """Freeze the job's frozen parameters; return the names of all that are never trained.

    The names are those of a full model; of tied parameters all names.

    Args:
        model: module before it is split.
        is_frozen: function that says for a name whether the job freezes it.
    """
    frozen = set()
    for name, parameter in model.named_parameters():
        if is_frozen(name):
            parameter.requires_grad_(False)
        is_low = parameter.dtype in LOW_PRECISION_DTYPES and not parameter.requires_grad
        if is_frozen(name) or is_low or not (parameter.is_floating_point() or parameter.is_complex()):
            frozen.add(parameter)
    named_parameters = model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, parameter in named_parameters if parameter in frozen)


def raise_frozen_released(name: str, parameter: torch.Tensor) -> None:
    """Refuse to train a parameter that is frozen for good.

    Raises:
        WanmaError: always.
    """
    if parameter.dtype in LOW_PRECISION_DTYPES:
        cause = f"it is {str(parameter.dtype).removeprefix('torch.')}, and trained parameters must be fp32"
    else:
        cause = "the job freezes it (model.lora_rank or train.parameter_groups)"
    raise WanmaError(
        f"{name}: the model sets requires_grad = True, but {cause}",
        "freeze parameters that are trained later only in the model, in fp32, with requires_grad_(False)",
    )


class RequiresGradSync:
    """Flags `requires_grad` of one module's FSDP2 shards, kept equal to those of the tensors that compute.

    FSDP2 hands a shard's flag on to the tensor that it gathers, never back.

    Args:
        model: module that FSDP2 has sharded.
        permanently_frozen: names of parameters that are frozen for good.
    """

    def __init__(self, model: nn.Module, permanently_frozen: Collection[str]) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._shards: list[_ShardFlag] = []
        for unit in fsdp_units(model):
            if (group := parameter_group(unit)) is None:
                continue
            shards = [
                _ShardFlag(shard, name, name in permanently_frozen)
                for shard in group.fsdp_params
                for name in [names.get(id(shard.sharded_param), "a parameter")]
            ]
            self._shards += shards

            def follow(*_: Any, group: FsdpParameterGroup = group, shards: list[_ShardFlag] = shards) -> None:
                for shard in shards:
                    shard.adopt_after_forward()
                if any(shard.is_trained for shard in shards):
                    choose_gradient_dtype(group)

            # Before FSDP2's own, which may put the shards in their places again.
            assert isinstance(unit, nn.Module)
            unit.register_forward_hook(uncompiled(follow), prepend=True)

    def adopt_late_changes(self) -> None:
        """Adopt the flags that have changed since the forward, after the last backward of a step."""
        for shard in self._shards:
            shard.adopt_late_change()


class _ShardFlag:
    """Flag of one parameter."""

    def __init__(self, shard: FsdpParameter, name: str, is_permanently_frozen: bool) -> None:
        self._shard, self._name, self._is_permanently_frozen = shard, name, is_permanently_frozen
        self._last_requires_grad: bool = shard.sharded_param.requires_grad

    @property
    def is_trained(self) -> bool:
        return bool(self._shard.sharded_param.requires_grad)

    def adopt_after_forward(self) -> None:
        """Adopt the flag of the gathered tensor, after a forward."""
        self._last_requires_grad = self._shard.unsharded_param.requires_grad
        self._set_trained(self._last_requires_grad)

    def adopt_late_change(self) -> None:
        unsharded = unsharded_or_none(self._shard)
        if unsharded is not None and unsharded.requires_grad != self._last_requires_grad:
            self._set_trained(unsharded.requires_grad)

    def _set_trained(self, is_trained: bool) -> None:
        state = self._shard.sharded_param
        if is_trained and self._is_permanently_frozen:
            raise_frozen_released(self._name, state)
        if state.requires_grad != is_trained:
            state.requires_grad_(is_trained)
