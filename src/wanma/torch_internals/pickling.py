"""Pickling by value of what torch's own pickling refuses, or writes and cannot read back.

These are tensors of some dtypes, and data loaders that keep processes between their iterations.
"""

from __future__ import annotations

import io
from typing import Any

import cloudpickle
import torch
from torch import Tensor
from torch.utils.data import DataLoader

_UNREADABLE_DTYPES = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}
"""Dtypes without a typed storage (such as `torch.ShortStorage`), and the dtypes as which they travel."""


class ValuePickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Pickler of cloudpickle that also takes such tensors; `pickle.loads` reads what it writes."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and obj.dtype in _UNREADABLE_DTYPES:
            return Tensor.view, (obj.detach().view(_UNREADABLE_DTYPES[obj.dtype]), obj.dtype)
        return super().reducer_override(obj)


def dumps_by_value(value: Any, pickler: type[ValuePickler] = ValuePickler) -> bytes:
    """Pickle `value`; what it refers to in the user's own program travels with it."""
    with io.BytesIO() as file:
        pickler(file).dump(value)
        return file.getvalue()


def drop_persistent_workers(loader: DataLoader[Any]) -> None:
    """Let the next iteration start new processes: old ones draw on from where the last left them."""
    loader._iterator = None


def attributes_without_workers(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the attributes of a loader before its first iteration; its processes cannot be pickled."""
    return {**vars(loader), "_iterator": None}
