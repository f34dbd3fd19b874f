"""State of a user's optimizer beside that of its parameters: entries of groups, attributes of the object.

They are addressed by paths, `groups.0.count` or `count`, and have a JSON form, which checkpoints keep. A
value without one only has a digest, by which the trial of the optimizer sees that it changes.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from wanma.job.errors import WanmaError

MAX_TENSOR_ELEMENTS = 1024
"""Largest tensor that has a JSON form; larger ones belong to the state of a parameter."""
_SET_GROUP_KEYS = frozenset({"params", "lr", "learning_rate_scale"})
"""Keys of a group that wanma sets."""
_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
_DIGEST = "digest"
_GROUPS, _CLASS = "groups", "class"


def read_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the JSON form of entries of groups, and of attributes of the object and its class, by path."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = {id(parameter): index for index, parameter in enumerate(parameters)}
    values = {
        f"{_GROUPS}.{index}.{key}": value
        for index, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key not in _SET_GROUP_KEYS
    }
    values |= {name: value for name, value in vars(optimizer).items() if name not in _torch_attributes()}
    for kind in type(optimizer).__mro__:
        if kind.__module__.startswith("torch."):
            break
        values |= {
            f"{_CLASS} {kind.__qualname__}.{name}": value
            for name, value in vars(kind).items()
            if not name.startswith("__") and not callable(value) and not hasattr(value, "__get__")
        }
    return {path: _to_json(value, indices) for path, value in values.items()}


@functools.cache
def _torch_attributes() -> frozenset[str]:
    """Return the attributes of every optimizer, such as its hooks."""
    return frozenset(vars(SGD([nn.Parameter(torch.zeros(1))]))) - {"defaults"}


def write_attributes(optimizer: Optimizer, values: Mapping[str, Any]) -> None:
    """Set entries of groups and attributes to the values that `read_attributes` returned.

    Raises:
        WanmaError: the optimizer has fewer groups.
    """
    for path, value in values.items():
        if path.startswith(f"{_GROUPS}."):
            _, index, key = path.split(".", 2)
            if int(index) >= len(optimizer.param_groups):
                raise WanmaError(
                    f"the checkpoint has the state of another optimizer: group {index} is missing",
                    "restore train.parameter_groups and the optimizer of that run",
                )
            optimizer.param_groups[int(index)][key] = _from_json(value, optimizer)
        else:
            setattr(optimizer, path, _from_json(value, optimizer))


def reset_attributes(optimizer: Optimizer, values: Mapping[str, Any]) -> None:
    """Undo what an update has changed since `read_attributes` returned `values`."""
    changed = changed_attributes(values, read_attributes(optimizer))
    recorded = {path: values[path] for path in changed if path in values and is_recorded(path, values[path])}
    write_attributes(optimizer, recorded)
    for path in changed.keys() - values.keys():
        if path.startswith(f"{_GROUPS}."):
            _, index, key = path.split(".", 2)
            del optimizer.param_groups[int(index)][key]
        else:
            delattr(optimizer, path)


def changed_attributes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `after` that `before` has not, or with another value."""
    return {path: value for path, value in after.items() if path not in before or before[path] != value}


def is_recorded(path: str, value: Any) -> bool:
    """Return whether a checkpoint can keep a value of `read_attributes`, and restore it."""
    return not path.startswith(f"{_CLASS} ") and not _has_digest(value)


def value_form(value: Any) -> Any:
    """Return the JSON form of one value."""
    return _to_json(value, {})


def _to_json(value: Any, parameter_indices: Mapping[int, int]) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, _CODE):
        return {"code": getattr(value, "__qualname__", value.__name__)}
    if isinstance(value, Tensor):
        if id(value) in parameter_indices:
            return {"parameter": parameter_indices[id(value)]}
        if value.numel() <= MAX_TENSOR_ELEMENTS and not value.is_complex() and type(value) is Tensor:
            content = [_to_json(item, {}) for item in value.detach().flatten().tolist()]
            return {
                "tensor": content,
                "dtype": str(value.dtype).removeprefix("torch."),
                "shape": list(value.shape),
                "is_on_host": value.device.type == "cpu",
            }
    if type(value) in (list, tuple):
        return {type(value).__name__: [_to_json(item, parameter_indices) for item in value]}
    if type(value) is dict and all(isinstance(key, str | int) for key in value):
        return {"dict": [[key, _to_json(item, parameter_indices)] for key, item in value.items()]}
    try:
        return {_DIGEST: hashlib.sha256(cloudpickle.dumps(value)).hexdigest()}
    except Exception:  # whatever its own pickling raises
        return {_DIGEST: type(value).__qualname__}


def _from_json(value: Any, optimizer: Optimizer) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content), *_) = value.items()
    match kind:
        case "float":
            return float(content)
        case "list":
            return [_from_json(item, optimizer) for item in content]
        case "tuple":
            return tuple(_from_json(item, optimizer) for item in content)
        case "dict":
            return {key: _from_json(item, optimizer) for key, item in content}
        case "parameter":
            return [p for group in optimizer.param_groups for p in group["params"]][content]
        case "tensor":
            device = torch.device("cpu") if value["is_on_host"] else _device(optimizer)
            numbers = [_from_json(item, optimizer) for item in content]
            dtype = getattr(torch, value["dtype"])
            return torch.tensor(numbers, dtype=dtype, device=device).reshape(value["shape"])
    raise AssertionError(f"no JSON form of a value: {kind}")


def _device(optimizer: Optimizer) -> torch.device:
    device: torch.device = optimizer.param_groups[0]["params"][0].device
    return device


def _has_digest(value: Any) -> bool:
    """Return whether a JSON form has a part that is only known by its digest, or is code."""
    if isinstance(value, dict):
        return _DIGEST in value or "code" in value or any(map(_has_digest, value.values()))
    return isinstance(value, list) and any(map(_has_digest, value))
