"""Arguments of the native library's calls, made from tensors.

The functions are pure but for the tensors' addresses: the caller keeps the tensors of a call alive until it
has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from wanma.collectives.shared_memory.native_library import (
    BYTES,
    TYPES,
    Call,
    Kind,
    Operation,
    pointers,
    sizes,
)

_OPERATIONS = (
    (ReduceOp.SUM, Operation.SUM),
    (ReduceOp.PRODUCT, Operation.PRODUCT),
    (ReduceOp.MIN, Operation.MIN),
    (ReduceOp.MAX, Operation.MAX),
    (ReduceOp.AVG, Operation.AVERAGE),
)
_OF_BOOLEANS = {Operation.SUM: Operation.MAX, Operation.PRODUCT: Operation.MIN}


def barrier() -> Call:
    return Call(Kind.BARRIER, BYTES)


def all_reduce(tensor: Tensor, operation: Operation) -> Call:
    """Build the call that sums `tensor` in place."""
    place = tensor.data_ptr()
    number = _number(tensor.dtype, operation)
    return Call(Kind.ALL_REDUCE, TYPES[tensor.dtype], number, 0, tensor.numel(), place, place)


def all_gather(outputs: list[int], own: Tensor) -> Call:
    """Build the call that writes every rank's tensor to these addresses, by rank; `own` is this rank's."""
    return Call(Kind.ALL_GATHER, BYTES, 0, 0, own.nbytes, own.data_ptr(), outputs=pointers(outputs))


def reduce_scatter(output: Tensor, slices: list[int], whole: int | None, operation: Operation) -> Call:
    """Build the call that writes the sum of all ranks' slices for this rank to `output`.

    Args:
        output: this rank's sum.
        slices: addresses of this rank's summands, by the rank that gets them.
        whole: address of the slices as one contiguous block; None: they are not contiguous.
        operation: reduction.
    """
    return Call(
        kind=Kind.REDUCE_SCATTER,
        type=TYPES[output.dtype],
        operation=_number(output.dtype, operation),
        count=output.numel(),
        input=whole,
        output=output.data_ptr(),
        inputs=pointers(slices),
    )


def broadcast(tensor: Tensor, root: int) -> Call:
    place = tensor.data_ptr()
    return Call(Kind.BROADCAST, BYTES, 0, root, tensor.nbytes, place, place)


def all_to_all(
    output: Tensor,
    own: Tensor,
    output_sizes: Sequence[int] | None,
    input_sizes: Sequence[int] | None,
    ranks: int,
) -> Call:
    """Build the call that sends rows of `own` to each rank and receives rows from each.

    Raises:
        ValueError: sizes and tensors do not match.
    """
    if not plain([output, own]) or output.dtype != own.dtype:
        raise ValueError("all_to_all takes contiguous CPU tensors of one type")
    received, sent = _row_bytes(output, output_sizes, ranks), _row_bytes(own, input_sizes, ranks)
    return Call(
        kind=Kind.ALL_TO_ALL,
        type=BYTES,
        inputs=pointers(_places(own, sent)),
        outputs=pointers(_places(output, received)),
        input_bytes=sizes(sent),
        output_bytes=sizes(received),
    )


def operation_of(opts: Any, tensors: Sequence[Tensor]) -> Operation | None:
    """Return the reduction that `opts` requests for `tensors`; None if this library does not do it."""
    if not tensors or not plain(tensors):
        return None
    dtype = tensors[0].dtype
    if dtype not in TYPES or any(tensor.dtype != dtype for tensor in tensors):
        return None
    operation = next((ours for theirs, ours in _OPERATIONS if opts.reduceOp == theirs), None)
    if operation is Operation.AVERAGE and not dtype.is_floating_point:
        return None
    return operation


def check_whole(name: str, whole: Tensor, part: Tensor, ranks: int) -> None:
    """Check that `whole` has `ranks` times the elements of `part`.

    Raises:
        ValueError: it has not, or they are not contiguous CPU tensors of one type.
    """
    if not plain([whole, part]) or whole.dtype != part.dtype:
        raise ValueError(f"{name} takes contiguous CPU tensors of one type")
    if whole.numel() != part.numel() * ranks:
        raise ValueError(f"{name}: {ranks} parts of {part.numel()} elements are not {whole.numel()} in all")


def plain(tensors: Sequence[Tensor]) -> bool:
    """Return True if all are dense, contiguous and in this host's memory; wrapper tensors have none."""
    return all(
        tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and (tensor.data_ptr() != 0 or tensor.nbytes == 0)
        for tensor in tensors
    )


def _number(dtype: torch.dtype, operation: Operation) -> Operation:
    return _OF_BOOLEANS.get(operation, operation) if dtype == torch.bool else operation


def _row_bytes(tensor: Tensor, rows: Sequence[int] | None, ranks: int) -> list[int]:
    """Return the bytes of each rank's share of dimension 0."""
    held = tensor.shape[0] if tensor.ndim else 0
    if not rows:
        if held % ranks:
            raise ValueError(f"all_to_all: {held} rows are not the same for {ranks} ranks")
        rows = [held // ranks] * ranks
    if len(rows) != ranks or sum(rows) != held:
        raise ValueError(f"all_to_all: {list(rows)} are not {held} rows for {ranks} ranks")
    each = tensor.nbytes // held if held else 0
    return [count * each for count in rows]


def _places(tensor: Tensor, parts: Sequence[int]) -> list[int]:
    """Return the addresses of a tensor's consecutive parts, given their bytes."""
    places, at = [], tensor.data_ptr()
    for part in parts:
        places.append(at)
        at += part
    return places
