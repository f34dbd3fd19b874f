"""Restoration of the state after forwards before the first step: weights, buffers, attributes, generators."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wanma.checkpoint.format.local_shards import local_tensor
from wanma.models.user_modules.user_attributes import MODULE_ATTRIBUTES, is_user_object
from wanma.torch_internals.modules import registered_buffers, registered_parameters
from wanma.training.checkpointing.training_state import random_state, restore_random_state

_SMALL_BYTES = 64 << 20


class SavedState:
    """Copy of the state of modules and of this process's generators, restorable any number of times.

    It covers parameters and their `requires_grad`, buffers, training mode, the generators of torch, numpy and
    Python, and attributes of users' classes: numbers, tensors, arrays and containers of Python, of which
    copies are made.

    Args:
        modules: modules to copy, with their children.
        other_objects: further objects of users, such as a loss.
    """

    def __init__(self, modules: Iterable[nn.Module], other_objects: Iterable[object] = ()) -> None:
        roots = [*modules, *(candidate for candidate in other_objects if isinstance(candidate, nn.Module))]
        saved_modules = list(dict.fromkeys(module for root in roots for module in root.modules()))
        self._tensors = [
            (tensor, local_tensor(tensor).detach().clone()) for tensor in _tensors_to_save(saved_modules)
        ]
        self._owners = {
            f"{path}.{name}" if path else name: (module, name)
            for root in roots
            for path, module in root.named_modules()
            for name in (*registered_parameters(module), *registered_buffers(module))
        }
        self._module_states = [
            (module, dict(registered_buffers(module)), module.training) for module in saved_modules
        ]
        parameters = _unique(
            parameter for module in saved_modules for parameter in registered_parameters(module).values()
        )
        self._gradient_flags = [(parameter, parameter.requires_grad) for parameter in parameters]
        plain_objects = [module for module in other_objects if not isinstance(module, nn.Module)]
        user_objects = [module for module in (*saved_modules, *plain_objects) if is_user_object(module)]
        self._attributes = [(user_object, _copied(vars(user_object))) for user_object in user_objects]
        self._generators = random_state(), np.random.get_state(), random.getstate()

    @torch.no_grad()
    def changes(self) -> dict[str, Tensor]:
        """Return this rank's parts of the parameters and buffers that have changed, by name."""
        values = {id(tensor): value for tensor, value in self._tensors}
        buffers = {id(module): saved for module, saved, _ in self._module_states}
        changed: dict[str, Tensor] = {}
        for full_name, (module, name) in self._owners.items():
            current = registered_parameters(module).get(name, registered_buffers(module).get(name))
            saved = buffers[id(module)].get(name, current)
            value = values.get(id(saved))
            if current is None or value is None:
                continue
            part = local_tensor(current).detach()
            if part.shape != value.shape or not torch.equal(part, value):
                changed[full_name] = part.clone()
        return changed

    def changed_parameters(self) -> list[str]:
        """Return the names of the parameters of which this rank's parts have changed."""
        return [
            name
            for name in self.changes()
            if (owner := self._owners[name])[1] in registered_parameters(owner[0])
        ]

    @property
    def attributes_changed(self) -> bool:
        """True if an attribute of a user's class has changed."""
        return any(_is_changed(user_object, attributes) for user_object, attributes in self._attributes)

    @torch.no_grad()
    def restore(self) -> None:
        for module, buffers, training in self._module_states:
            registered_buffers(module).clear()
            registered_buffers(module).update(buffers)
            module.training = training
        for parameter, is_trained in self._gradient_flags:
            parameter.requires_grad_(is_trained)
        for tensor, value in self._tensors:
            _write(local_tensor(tensor), value)
        for user_object, attributes in self._attributes:
            _restore(user_object, attributes)
        torch_state, numpy_state, python_state = self._generators
        restore_random_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


@contextmanager
def preserve_state(
    modules: Iterable[nn.Module], other_objects: Iterable[object] = ()
) -> Iterator[SavedState]:
    """Restore the state of `SavedState` at the end of the context."""
    saved_state = SavedState(modules, other_objects)
    try:
        yield saved_state
    finally:
        saved_state.restore()


def _tensors_to_save(modules: list[nn.Module]) -> list[Tensor]:
    """Return the tensors to copy: as much memory as their gradients will need, which do not exist yet.

    Frozen parameters that are far more than the trained ones are a base of adapters: no forward changes them.
    """
    parameters = _unique(
        parameter for module in modules for parameter in registered_parameters(module).values()
    )
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    are_frozen_small = _bytes(frozen) <= _bytes(trained) + _SMALL_BYTES
    return [
        *trained,
        *(frozen if are_frozen_small else ()),
        *_unique(buffer for module in modules for buffer in registered_buffers(module).values()),
    ]


def _unique(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors if tensor is not None}.values())


def _bytes(tensors: list[Tensor]) -> int:
    return sum(local_tensor(tensor).nbytes for tensor in tensors)


def _copied(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return (value, copy of its content) by attribute name."""
    return {
        name: (value, _content(value)) for name, value in attributes.items() if name not in MODULE_ATTRIBUTES
    }


def _content(value: Any) -> Any:
    if isinstance(value, Tensor):
        return local_tensor(value).detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    return copy.copy(value) if type(value) in (list, dict, set, deque) else None


def _restore(user_object: object, attributes: dict[str, tuple[Any, Any]]) -> None:
    now = vars(user_object)
    for name in now.keys() - attributes.keys() - MODULE_ATTRIBUTES:
        del now[name]
    for name, (value, content) in attributes.items():
        now[name] = value
        if content is None:
            continue
        if isinstance(value, Tensor):
            _write(local_tensor(value), content)
        elif isinstance(value, np.ndarray):
            value[...] = content
        else:
            value.clear()
            (value.extend if isinstance(value, list | deque) else value.update)(content)


def _is_changed(user_object: object, attributes: dict[str, tuple[Any, Any]]) -> bool:
    now = {name: value for name, value in vars(user_object).items() if name not in MODULE_ATTRIBUTES}
    if now.keys() != attributes.keys():
        return True
    for name, (value, content) in attributes.items():
        current = now[name]
        if current is not value and not (isinstance(value, int | float | str) and current == value):
            return True
        if isinstance(value, Tensor):
            if not torch.equal(local_tensor(value), content):
                return True
        elif isinstance(value, np.ndarray):
            if not np.array_equal(value, content):
                return True
        elif content is not None and len(content) != len(value):
            return True
    return False


def _write(tensor: Tensor, value: Tensor) -> None:
    if tensor.shape == value.shape and not torch.equal(tensor, value):
        tensor.copy_(value)
