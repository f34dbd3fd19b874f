"""Low-rank adapters (LoRA, Hu et al. 2021): a linear layer computes W + scale · B A with a frozen weight W.

    lora_a  (rank, inputs)    begins uniform within ± 1 / sqrt(inputs), as in the authors' own code
    lora_b  (outputs, rank)   begins at zero, so that training begins at the model as it was

A layer keeps its name, its place and its own parameters' names; only its class and the two parameters
are new. All other parameters are frozen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from wanma.job.errors import JobError, WanmaError, did_you_mean
from wanma.job.sections.model import ModelSection

_A, _B = "lora_a", "lora_b"


class LoRALinear(nn.Module):
    """Mixin beside `nn.Linear` or a similar class that adds the adapter's output."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_scale: float

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., inputs) to (..., outputs), as the linear layer does."""
        update = F.linear(F.linear(x, self.lora_a), self.lora_b)
        result: Tensor = super().forward(x) + update * self.lora_scale
        return result


def apply_lora(model: nn.Module, section: ModelSection) -> nn.Module:
    """Give `model` adapters (`lora_rank`, `lora_alpha`, `lora_targets`) and freeze the rest, in place.

    Raises:
        JobError: a target matches no linear layer, or the rank is not below a layer's dims.
    """
    if any(isinstance(module, LoRALinear) for module in model.modules()):
        return model
    layers = {
        path: module
        for path, module in model.named_modules()
        # torch's own attention uses this layer's weight without calling it.
        if isinstance(module, nn.Linear) and not isinstance(module, NonDynamicallyQuantizableLinear)
    }
    targeted = [path for path in layers if any(fnmatchcase(path, target) for target in section.lora_targets)]
    _check_targets(section, list(layers), targeted)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for path in targeted:
        _apply_to_linear(path, layers[path], section)
    if hasattr(model, "initialize_parameter"):
        inputs = {path: layers[path].in_features for path in targeted}
        initializer: Any = model.initialize_parameter
        setattr(model, "initialize_parameter", _LoRAInitializer(initializer, inputs))  # noqa: B010  # no parameter
    return model


def is_lora_parameter(name: str) -> bool:
    """Return True if a parameter of this name is part of an adapter."""
    return name.rpartition(".")[2] in (_A, _B)


def merge_lora(tensors: Mapping[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """Merge a model's adapters into the weights that they adapt: W + alpha / rank · B A.

    Args:
        tensors: full tensors, by name.
        alpha: `model.lora_alpha`.

    Returns:
        The tensors without adapters; those that have none are not copied. The sum is computed in at least
        fp32. It has the wider dtype of weight and adapter, because frozen weights may be kept in fewer bits.

    Raises:
        WanmaError: an adapter without its other half or its weight.
    """
    merged = {name: tensor for name, tensor in tensors.items() if not is_lora_parameter(name)}
    for name in tensors:
        layer = name.rpartition(".")[0]
        if not is_lora_parameter(name):
            continue
        names = [f"{layer}.{part}" if layer else part for part in ("weight", _A, _B)]
        if missing := [part for part in names if part not in tensors]:
            raise WanmaError(f"the adapter of '{layer}' cannot be merged: {missing[0]} is missing")
        if name.endswith(_B):
            continue
        weight, a, b = (tensors[part] for part in names)
        result_dtype = torch.promote_types(weight.dtype, a.dtype)
        compute_dtype = torch.promote_types(result_dtype, torch.float32)
        update = b.to(compute_dtype) @ a.to(compute_dtype) * (alpha / a.shape[0])
        merged[names[0]] = (weight.to(compute_dtype) + update).to(result_dtype)
    return merged


def _apply_to_linear(path: str, layer: nn.Linear, section: ModelSection) -> None:
    rank, smallest = section.lora_rank, min(layer.in_features, layer.out_features)
    if rank >= smallest:
        raise JobError(
            f"model.lora_rank = {rank} is not smaller than the dimensions of {path}, {layer.in_features} × "
            f"{layer.out_features}",
            f"set model.lora_rank below {smallest}, or choose other model.lora_targets",
        )
    kind = type(layer)
    layer.__class__ = type(f"Adapted{kind.__name__}", (LoRALinear, kind), {})
    options: Any = {"dtype": layer.weight.dtype, "device": layer.weight.device}
    lora_layer: Any = layer
    lora_layer.lora_scale = section.lora_alpha / rank
    lora_layer.lora_a = nn.Parameter(torch.empty(rank, layer.in_features, **options))
    lora_layer.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank, **options))
    _init_lora_a(lora_layer.lora_a, layer.in_features, None)


def _init_lora_a(tensor: Tensor, inputs: int, generator: torch.Generator | None) -> None:
    bound = 1 / math.sqrt(inputs)
    with torch.no_grad():
        tensor.uniform_(-bound, bound, generator=generator)


class _LoRAInitializer:
    """Initializer of a model with adapters: the model's own parameters keep their own rule."""

    def __init__(self, model_initializer: Any, inputs: dict[str, int]) -> None:
        self._model_initializer, self._inputs = model_initializer, inputs

    def __call__(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        layer, _, part = name.rpartition(".")
        if layer in self._inputs and part == _A:
            _init_lora_a(tensor, self._inputs[layer], generator)
        elif layer in self._inputs and part == _B:
            tensor.zero_()
        else:
            self._model_initializer(name, tensor, generator)


def _check_targets(section: ModelSection, layers: list[str], targeted: list[str]) -> None:
    """Reject user-given targets that match no layer, and default ones if none of them does."""
    default = ModelSection.model_fields["lora_targets"].get_default(call_default_factory=True)
    targets = section.lora_targets if section.lora_targets != default else []
    unmatched = [t for t in targets if not any(fnmatchcase(path, t) for path in layers)]
    if not unmatched and targeted:
        return
    target_text = (
        f"model.lora_targets = '{unmatched[0]}'"
        if unmatched
        else f"model.lora_targets = {default} (the default)"
    )
    raise JobError(
        f"{target_text} does not match any linear "
        f"layer.{did_you_mean(unmatched[0], layers) if unmatched else ''}",
        f"use names of linear layers such as {', '.join(_example_paths(layers))}"
        if layers
        else "remove model.lora_rank: the model has no linear layers",
    )


def _example_paths(paths: list[str]) -> list[str]:
    """Return one path of each kind: paths that differ only in numbers count as one."""
    kinds = {tuple(part for part in path.split(".") if not part.isdigit()): path for path in reversed(paths)}
    return [f"'{path}'" for path in list(kinds.values())[::-1][:8]]
