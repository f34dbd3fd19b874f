"""Allocation and initial values of parameters: each rank's own part, with the same values in any layout."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from wanma.checkpoint.format.local_shards import local_box, local_tensor
from wanma.checkpoint.format.tensor_blocks import iterate_blocks
from wanma.models.structure.parameter_initialization import draw_initial_shard
from wanma.torch_internals.loaded import DTensor
from wanma.torch_internals.modules import registered_buffers

_DRAWS = frozenset((Tensor.normal_, Tensor.uniform_))


class WithoutValues(TorchFunctionMode):
    """Mode in which modules draw no initial values: on the meta device torch would import sympy for them."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = dict(kwargs or {})
        if func in _DRAWS or getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else keywords["tensor"]
        return func(*args, **keywords)


def materialize_parameters(
    model: nn.Module, parameter_device: torch.device, buffer_device: torch.device
) -> None:
    """Allocate a model that was built on the meta device; its parameters hold no values yet.

    Replicated parameters that are plain tensors have their memory already.

    Args:
        model: module on the meta device.
        parameter_device: device of the parameters.
        buffer_device: device of the buffers, which may be the same.
    """
    if any(
        isinstance(parameter, DTensor) or parameter.device.type == "meta" for parameter in model.parameters()
    ):
        model.to_empty(device=parameter_device)
    for module in model.modules():  # all of them, before a module gives those of others their values
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device.type == "meta":
                size, stride = buffer.shape, buffer.stride()
                buffer = torch.empty_strided(size, stride, dtype=buffer.dtype, device=buffer_device)
            registered_buffers(module)[name] = buffer.to(buffer_device)
    for module in model.modules():
        reset = getattr(module, "reset_buffers", None)
        if callable(reset):
            reset()


@torch.no_grad()
def initialize_parameters(
    model: nn.Module,
    seed: int,
    exclude: Container[str] = (),
    after_block: Callable[[], None] = lambda: None,
) -> None:
    """Draw this rank's part of every parameter's initial value.

    A value is a function of (seed, parameter name) alone; a rank draws the tiles that its box touches.

    Args:
        model: module whose parameters have memory.
        seed: seed of the job.
        exclude: names of parameters that are filled otherwise.
        after_block: function that is called whenever some values are there.
    """
    for name, parameter in model.named_parameters():
        if name in exclude:
            continue
        box = local_box(name, parameter)
        assert box is not None  # parameters lie on this rank's own mesh
        local = local_tensor(parameter)
        for block in iterate_blocks(box.shape):  # memory need not hold another copy of a large one
            offset = tuple(map(operator.add, box.offset, block.offset))
            part = draw_initial_shard(
                model, name, parameter.shape, offset, block.shape, parameter.dtype, seed
            )
            local[block.slices].copy_(part)
            after_block()
