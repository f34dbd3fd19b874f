"""Pickling of what torch refuses to pickle, for other processes: parametrizations, loaders with processes.

torch gives a module with parametrizations (`torch.nn.utils.parametrize`) a class of its own at run time. Here
the original class travels with the attributes, and the parametrizations are registered again. A data loader
travels without the processes that it keeps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader

from wanma.torch_internals import pickling
from wanma.torch_internals.modules import CHILDREN


class _Pickler(pickling.ValuePickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module) and parametrize.is_parametrized(obj):
            kind = parametrize.type_before_parametrizations(obj)
            return _new_empty, (kind,), vars(obj), None, None, _restore_attributes
        if isinstance(obj, DataLoader):
            return _new_empty, (type(obj),), pickling.attributes_without_workers(obj)
        return super().reducer_override(obj)


def dumps_by_value(*values: Any) -> bytes:
    """Pickle each value by value, parametrizations and loaders too; `pickle.load` reads one."""
    return b"".join(pickling.dumps_by_value(value, _Pickler) for value in values)


def _new_empty(kind: Any) -> Any:
    return kind.__new__(kind)


def _restore_attributes(module: nn.Module, attributes: dict[str, Any]) -> None:
    """Give a module its attributes, and a class of its own with the parametrizations."""
    modules = dict(attributes[CHILDREN])
    lists = modules.pop("parametrizations")
    module.__dict__.update({**attributes, CHILDREN: modules})
    for name, parametrizations in lists.items():
        # torch makes the class and the property from a stand-in tensor; then its parametrizations are put in.
        module.register_parameter(name, nn.Parameter(torch.zeros(1)))
        parametrize.register_parametrization(module, name, nn.Identity(), unsafe=True)
        parametrized: Any = module.parametrizations
        parametrized[name] = parametrizations
