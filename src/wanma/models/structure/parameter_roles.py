"""Roles of a model's parameters, by which optimizers treat them differently.

They are determined once on the whole model, before a plan splits it: a stage or a shard no longer shows which
linear layer is the last one, and every layout must decide alike. Evidence is the kind of the module that owns
a parameter, never a parameter's path.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from wanma.job.sections.train import ParameterGroupSection
from wanma.models.structure.repeated_blocks import find_repeated_blocks
from wanma.torch_internals.modules import ConvolutionBase, NormBase


@dataclass(frozen=True)
class ParameterRole:
    """Role of one parameter."""

    has_weight_decay: bool
    """True if `train.weight_decay` applies: it is neither a bias nor part of a norm."""
    is_hidden_matrix: bool | None
    """True if it is a hidden layer's matrix, which Muon orthogonalizes; None: its module does not tell."""
    is_matrix: bool
    """True if it has two dimensions."""


_NORM_CLASSES = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, NormBase)
_EMBEDDING_CLASSES = (nn.Embedding, nn.EmbeddingBag)
_MATMUL_CLASSES = (
    nn.Linear,
    nn.Bilinear,
    ConvolutionBase,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
)
# User-written classes are recognized by the usual ending of their names. transformers' Conv1D is a
# linear layer with its weight transposed.
_NORM_CLASS_NAME = re.compile(r"Norm(\d*[dD])?$")
_EMBEDDING_CLASS_NAME = re.compile(r"Embeddings?$")
_MATMUL_CLASS_NAME = re.compile(r"(Linear|Router|RouterGate|Conv1D)$")
_BIAS = re.compile(r"(^|_)bias(_|$)")


def find_parameter_roles(model: nn.Module) -> dict[str, ParameterRole]:
    """Return the role of each parameter of a whole model, by name.

    Weight decay leaves out norms (whatever their weights' shape), biases, and other parameters of one
    dimension that is not 1, such as a class token of (1, 1, hidden). Hidden matrices are the two-dimensional
    weights of linear, recurrent and attention layers, except for the output layer: that of
    `get_output_embeddings`, the last linear layer of a module without it, and parameters tied to either.
    """
    outputs = {id(parameter) for layer in find_output_layers(model) for parameter in layer.parameters()}
    owners: dict[int, list[ParameterRole]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            role = _role(module, name, parameter)
            if id(parameter) in outputs:
                role = replace(role, is_hidden_matrix=False)
            owners.setdefault(id(parameter), []).append(role)
    return {name: _combine_roles(owners[id(parameter)]) for name, parameter in model.named_parameters()}


def find_parameter_group(name: str, groups: Iterable[ParameterGroupSection]) -> ParameterGroupSection | None:
    """Return the first group of `train.parameter_groups` that matches parameter `name`; None: no group."""
    return next((group for group in groups if fnmatchcase(name, group.match)), None)


def is_frozen(name: str, groups: Iterable[ParameterGroupSection]) -> bool:
    """Return True if `train.parameter_groups` freezes parameter `name`."""
    group = find_parameter_group(name, groups)
    return group is not None and group.frozen


def find_output_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that compute a model's output, several if it has heads for several tasks."""
    output_layer = _declared_output_layer(model)
    if output_layer is not None:
        return [output_layer]
    nested_layers = (_declared_output_layer(module) for module in model.modules())
    return [*_last_linear_layers(model), *(layer for layer in nested_layers if layer is not None)]


def _declared_output_layer(module: nn.Module) -> nn.Module | None:
    """Return the output layer that a transformers model declares; None: none."""
    getter: Any = getattr(module, "get_output_embeddings", None)
    layer = getter() if callable(getter) else None
    return layer if isinstance(layer, nn.Module) else None


def _role(module: nn.Module, name: str, parameter: nn.Parameter) -> ParameterRole:
    """Return the role of a parameter as one of its modules owns it."""
    is_matrix = parameter.ndim == 2
    if parameter.ndim < 2 or _BIAS.search(name) or _is_kind_of(module, _NORM_CLASSES, _NORM_CLASS_NAME):
        return ParameterRole(False, False, is_matrix)
    if _is_kind_of(module, _EMBEDDING_CLASSES, _EMBEDDING_CLASS_NAME):
        return ParameterRole(True, False, is_matrix)
    if _is_kind_of(module, _MATMUL_CLASSES, _MATMUL_CLASS_NAME):
        return ParameterRole(True, is_matrix, is_matrix)
    if sum(size > 1 for size in parameter.shape) < 2:
        return ParameterRole(False, False, is_matrix)
    return ParameterRole(True, None if is_matrix else False, is_matrix)


def _combine_roles(roles: list[ParameterRole]) -> ParameterRole:
    """Combine the roles of a parameter that several modules own: tied to a table it is no hidden matrix."""
    hidden = {role.is_hidden_matrix for role in roles}
    is_hidden_matrix = False if False in hidden else (None if None in hidden else True)
    return ParameterRole(all(role.has_weight_decay for role in roles), is_hidden_matrix, roles[0].is_matrix)


def _is_kind_of(module: nn.Module, classes: tuple[type[nn.Module], ...], class_name: re.Pattern[str]) -> bool:
    if isinstance(module, classes):
        return True
    return any(class_name.search(kind.__name__) for kind in type(module).__mro__ if kind is not nn.Module)


def _last_linear_layers(model: nn.Module) -> list[nn.Module]:
    """Return the linear layer that a model registers last, and its neighbours that are heads like it."""
    block_module_ids = {
        id(m) for block in find_repeated_blocks(model) for m in block.modules() if m is not block
    }
    layers = list(_matmul_layers(model))
    if not layers or not isinstance(layers[-1][1], nn.Linear) or id(layers[-1][1]) in block_module_ids:
        return []
    parent, last = layers[-1]
    heads: list[nn.Module] = [last]
    if parent is not model and not isinstance(parent, (nn.ModuleList, nn.ModuleDict)):
        return heads
    for other_parent, layer in reversed(layers[:-1]):
        # A layer whose outputs the next one cannot take, with the same inputs, is a separate head.
        is_head = (
            other_parent is parent
            and isinstance(layer, nn.Linear)
            and layer.in_features == last.in_features
            and (isinstance(parent, nn.ModuleDict) or layer.out_features != last.in_features)
        )
        if not is_head:
            break
        heads.append(layer)
    return heads


def _matmul_layers(module: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield (parent, layer) of every layer with a matrix product, in the order of registration."""
    if isinstance(module, _MATMUL_CLASSES):
        yield module, module
    for child in module.children():
        if isinstance(child, NonDynamicallyQuantizableLinear):
            continue  # part of torch's attention, which counts as one layer
        if isinstance(child, _MATMUL_CLASSES):
            yield module, child
        else:
            yield from _matmul_layers(child)
