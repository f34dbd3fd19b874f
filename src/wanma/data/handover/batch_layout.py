"""Layout of a batch in one buffer, in which it is handed to another process without pickling.

The buffer begins with what every rank needs (sample indices, mask of real rows, keyword arguments), then come
the targets, then the inputs. So a rank of a pipeline that needs no inputs is sent the beginning only.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from wanma.data.batch import BadSample, Batch

Content = Literal["complete", "targets", "rows"]
"""Part of a batch.

Rows: sample indices, mask and keyword arguments; targets: these and the targets. Tensors that are left out
keep their shape.
"""
Buffer = Any
"""Writable object with the buffer protocol, of bytes."""

_ALIGNMENT_BYTES = 64


class UnsupportedTensorError(Exception):
    """Error: a tensor that cannot lie in a buffer of bytes."""


def layout_of(batch: Batch) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the layout of a batch as a JSON-able object, and its tensors in their order.

    Raises:
        UnsupportedTensorError: a tensor is sparse, quantized, a subclass or on a device.
    """
    tensors: list[Tensor] = []
    entries: list[list[Any]] = []
    numbers: dict[int, int] = {}
    end = 0

    def place(tensor: Tensor) -> int:
        nonlocal end
        number = numbers.get(id(tensor))
        if number is not None:
            return number
        _check_tensor(tensor)
        start = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        end = start + tensor.numel() * tensor.element_size()
        stride = tensor.stride() if _is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
        entries.append([str(tensor.dtype).removeprefix("torch."), list(tensor.shape), list(stride), start])
        tensors.append(tensor)
        numbers[id(tensor)] = len(tensors) - 1
        return len(tensors) - 1

    fields: dict[str, Any] = {"samples": place(batch.samples), "real": place(batch.real)}
    fields["keywords"] = {name: place(tensor) for name, tensor in batch.keywords.items()}
    ends: dict[Content, int] = {"rows": end}
    fields["targets"] = place(batch.targets)
    named = batch.named_targets
    fields["named_targets"] = None if named is None else {name: place(named[name]) for name in named}
    ends["targets"] = end
    fields["inputs"] = [place(tensor) for tensor in batch.inputs]
    ends["complete"] = end
    bad_samples = [[one.sample, one.place, one.cause, one.is_substituted] for one in batch.bad_samples]
    others = {"target_key": batch.target_key, "class_range": batch.class_range, "bad_samples": bad_samples}
    return {"tensors": entries, "ends": ends, "fields": fields, **others}, tensors


def write_tensors(layout: dict[str, Any], tensors: list[Tensor], buffer: Buffer) -> None:
    """Copy tensors to their places in a buffer of at least `layout["ends"]["complete"]` bytes."""
    for entry, tensor in zip(layout["tensors"], tensors, strict=True):
        if tensor.numel():
            _view(entry, buffer).copy_(tensor)


def read_batch(layout: dict[str, Any], buffer: Buffer, size: int) -> Batch:
    """Return the batch of a layout, as views of a buffer that holds its first `size` bytes.

    Tensors behind them have their shape and no memory of their own.
    """
    tensors = [_tensor(entry, buffer, size) for entry in layout["tensors"]]
    fields, class_range = layout["fields"], layout["class_range"]
    named = fields["named_targets"]
    return Batch(
        inputs=tuple(tensors[number] for number in fields["inputs"]),
        targets=tensors[fields["targets"]],
        samples=tensors[fields["samples"]],
        real=tensors[fields["real"]],
        keywords={name: tensors[number] for name, number in fields["keywords"].items()},
        target_key=layout["target_key"],
        named_targets=None if named is None else {name: tensors[number] for name, number in named.items()},
        class_range=None if class_range is None else (int(class_range[0]), int(class_range[1])),
        bad_samples=tuple(BadSample(*values) for values in layout["bad_samples"]),
    )


def _check_tensor(tensor: Tensor) -> None:
    if type(tensor) is not Tensor:
        raise UnsupportedTensorError(f"a sample has a {type(tensor).__name__}, which is no plain tensor")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise UnsupportedTensorError(f"a sample has a tensor of layout {tensor.layout}, {tensor.dtype}")
    if tensor.device.type != "cpu":
        raise UnsupportedTensorError(f"a sample has a tensor on {tensor.device}")
    if tensor.is_conj() or tensor.is_neg() or tensor.requires_grad:
        raise UnsupportedTensorError("a sample has a tensor with a gradient or a lazy conjugation")


def _is_dense(tensor: Tensor) -> bool:
    """Return True if the elements fill their memory without gaps or overlaps, in any order of the dims."""
    expected = 1
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(pair for pair in sizes if pair[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _view(entry: list[Any], buffer: Buffer) -> Tensor:
    dtype, shape, stride, start = entry
    flat = torch.frombuffer(buffer, dtype=getattr(torch, dtype), count=math.prod(shape), offset=start)
    return flat.as_strided(shape, stride)


def _tensor(entry: list[Any], buffer: Buffer, size: int) -> Tensor:
    dtype, shape, _, start = entry
    element_type: torch.dtype = getattr(torch, dtype)
    if not math.prod(shape):
        return torch.empty(shape, dtype=element_type)
    if start + math.prod(shape) * element_type.itemsize > size:
        return torch.zeros([1] * len(shape), dtype=element_type).expand(shape)
    return _view(entry, buffer)
