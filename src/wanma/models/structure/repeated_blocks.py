"""Search for the repeated blocks of a module that declares none.

They are the units of recompute, compilation, offload and sharding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain

from torch import nn

MINIMUM_BLOCK_SHARE = 0.01
"""Minimum share of a model's parameters: smaller lists, such as a pair of projections, are no blocks."""

_CONTAINER_CLASSES = (nn.ModuleList, nn.ModuleDict)
_Blocks = list[nn.Module]


def find_repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Find a model's repeated blocks by structure, in the model's order.

    They are the members of its lists, dicts and sequences of at least two modules of one type, wherever
    these are: an encoder's and a decoder's, the levels of a pyramid. Of lists within lists the outer counts
    if most of its members are alike, as layers with experts are; if they are not, as the stages of a
    pyramid are not, the inner ones do where they hold most of the parameters.
    """
    total = _parameter_count([model])
    return [
        block
        for blocks in _block_lists(model)
        if _parameter_count(blocks) >= MINIMUM_BLOCK_SHARE * total
        for block in blocks
    ]


def find_shared_parameters(model: nn.Module, blocks: Iterable[nn.Module]) -> set[int]:
    """Return the ids of the parameters that one of `blocks` has in common with the rest of the model."""
    blocks = list(blocks)
    block_counts = Counter(id(p) for block in blocks for p in set(block.parameters()))
    members = {id(module) for block in blocks for module in block.modules()}
    outer_modules = (module for module in model.modules() if id(module) not in members)
    outer_ids = {id(p) for module in outer_modules for p in module.parameters(recurse=False)}
    return {key for key, count in block_counts.items() if count > 1 or key in outer_ids}


def _block_lists(module: nn.Module) -> list[_Blocks]:
    """Return the lists of blocks in `module`, from the outermost on."""
    nested_lists = list(chain.from_iterable(_block_lists(child) for child in module.children()))
    if not isinstance(module, (*_CONTAINER_CLASSES, nn.Sequential)):
        return nested_lists
    children = list(module.children())
    members = [child for child in children if any(True for _ in child.parameters())]
    # A sequence of a layer, an activation and a layer is one block.
    kinds = {_module_type(child) for child in (children if isinstance(module, nn.Sequential) else members)}
    if len(members) < 2 or len(kinds) > 1:
        return nested_lists
    _, largest_class = Counter(tuple(p.shape for p in member.parameters()) for member in members).most_common(
        1
    )[0]
    nested_parameters = _parameter_count(chain.from_iterable(nested_lists))
    if 2 * largest_class <= len(members) and 2 * nested_parameters > _parameter_count(members):
        return nested_lists
    return [list(chain.from_iterable(_callable_modules(member) for member in members))]


def _module_type(module: nn.Module) -> object:
    """Return the type of a module; for one without a forward, the types of its members too."""
    if isinstance(module, _CONTAINER_CLASSES):
        return type(module), tuple(_module_type(child) for child in module.children())
    return type(module)


def _callable_modules(module: nn.Module) -> _Blocks:
    """Return `module`, or the modules that are called in its place."""
    if isinstance(module, _CONTAINER_CLASSES):
        return list(chain.from_iterable(_callable_modules(child) for child in module.children()))
    return [module] if any(True for _ in module.parameters()) else []


def _parameter_count(modules: Iterable[nn.Module]) -> int:
    return sum({p: p.numel() for module in modules for p in module.parameters()}.values())
