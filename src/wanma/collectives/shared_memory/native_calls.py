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
    DTYPE_CODES,
    RAW_BYTES_CODE,
    CollectiveKind,
    NativeCall,
    ReduceOperation,
    make_pointer_array,
    make_size_array,
)

_NATIVE_OPERATIONS = (
    (ReduceOp.SUM, ReduceOperation.SUM),
    (ReduceOp.PRODUCT, ReduceOperation.PRODUCT),
    (ReduceOp.MIN, ReduceOperation.MIN),
    (ReduceOp.MAX, ReduceOperation.MAX),
    (ReduceOp.AVG, ReduceOperation.AVERAGE),
)
_BOOLEAN_OPERATIONS = {ReduceOperation.SUM: ReduceOperation.MAX, ReduceOperation.PRODUCT: ReduceOperation.MIN}


def barrier() -> NativeCall:
    return NativeCall(CollectiveKind.BARRIER, RAW_BYTES_CODE)


def all_reduce(tensor: Tensor, operation: ReduceOperation) -> NativeCall:
    """Build the call that sums `tensor` in place."""
    address = tensor.data_ptr()
    number = _native_operation(tensor.dtype, operation)
    return NativeCall(
        CollectiveKind.ALL_REDUCE, DTYPE_CODES[tensor.dtype], number, 0, tensor.numel(), address, address
    )


def all_gather(outputs: list[int], own: Tensor) -> NativeCall:
    """Build the call that writes every rank's tensor to these addresses, by rank; `own` is this rank's."""
    return NativeCall(
        CollectiveKind.ALL_GATHER,
        RAW_BYTES_CODE,
        0,
        0,
        own.nbytes,
        own.data_ptr(),
        outputs=make_pointer_array(outputs),
    )


def reduce_scatter(
    output: Tensor, slices: list[int], contiguous_address: int | None, operation: ReduceOperation
) -> NativeCall:
    """Build the call that writes the sum of all ranks' slices for this rank to `output`.

    Args:
        output: this rank's sum.
        slices: addresses of this rank's summands, by the rank that gets them.
        contiguous_address: address of the slices as one contiguous block; None: they are not contiguous.
        operation: reduction.
    """
    return NativeCall(
        kind=CollectiveKind.REDUCE_SCATTER,
        type=DTYPE_CODES[output.dtype],
        operation=_native_operation(output.dtype, operation),
        count=output.numel(),
        input=contiguous_address,
        output=output.data_ptr(),
        inputs=make_pointer_array(slices),
    )


def broadcast(tensor: Tensor, root: int) -> NativeCall:
    address = tensor.data_ptr()
    return NativeCall(CollectiveKind.BROADCAST, RAW_BYTES_CODE, 0, root, tensor.nbytes, address, address)


def all_to_all(
    output: Tensor,
    own: Tensor,
    output_sizes: Sequence[int] | None,
    input_sizes: Sequence[int] | None,
    ranks: int,
) -> NativeCall:
    """Build the call that sends rows of `own` to each rank and receives rows from each.

    Raises:
        ValueError: sizes and tensors do not match.
    """
    if not are_dense_on_cpu([output, own]) or output.dtype != own.dtype:
        raise ValueError("all_to_all takes contiguous CPU tensors of one type")
    received_bytes, sent_bytes = _row_bytes(output, output_sizes, ranks), _row_bytes(own, input_sizes, ranks)
    return NativeCall(
        kind=CollectiveKind.ALL_TO_ALL,
        type=RAW_BYTES_CODE,
        inputs=make_pointer_array(_part_addresses(own, sent_bytes)),
        outputs=make_pointer_array(_part_addresses(output, received_bytes)),
        input_bytes=make_size_array(sent_bytes),
        output_bytes=make_size_array(received_bytes),
    )


def select_reduce_operation(opts: Any, tensors: Sequence[Tensor]) -> ReduceOperation | None:
    """Return the reduction that `opts` requests for `tensors`; None if this library does not do it."""
    if not tensors or not are_dense_on_cpu(tensors):
        return None
    dtype = tensors[0].dtype
    if dtype not in DTYPE_CODES or any(tensor.dtype != dtype for tensor in tensors):
        return None
    operation = next(
        (
            native_operation
            for torch_operation, native_operation in _NATIVE_OPERATIONS
            if opts.reduceOp == torch_operation
        ),
        None,
    )
    if operation is ReduceOperation.AVERAGE and not dtype.is_floating_point:
        return None
    return operation


def check_gathered_size(name: str, whole: Tensor, part: Tensor, ranks: int) -> None:
    """Check that `whole` has `ranks` times the elements of `part`.

    Raises:
        ValueError: it has not, or they are not contiguous CPU tensors of one type.
    """
    if not are_dense_on_cpu([whole, part]) or whole.dtype != part.dtype:
        raise ValueError(f"{name} takes contiguous CPU tensors of one type")
    if whole.numel() != part.numel() * ranks:
        raise ValueError(f"{name}: {ranks} parts of {part.numel()} elements are not {whole.numel()} in all")


def are_dense_on_cpu(tensors: Sequence[Tensor]) -> bool:
    """Return True if all are dense, contiguous and in this host's memory; wrapper tensors have none."""
    return all(
        tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and (tensor.data_ptr() != 0 or tensor.nbytes == 0)
        for tensor in tensors
    )


def _native_operation(dtype: torch.dtype, operation: ReduceOperation) -> ReduceOperation:
    return _BOOLEAN_OPERATIONS.get(operation, operation) if dtype == torch.bool else operation


def _row_bytes(tensor: Tensor, rows: Sequence[int] | None, ranks: int) -> list[int]:
    """Return the bytes of each rank's share of dimension 0."""
    row_count = tensor.shape[0] if tensor.ndim else 0
    if not rows:
        if row_count % ranks:
            raise ValueError(f"all_to_all: {row_count} rows are not the same for {ranks} ranks")
        rows = [row_count // ranks] * ranks
    if len(rows) != ranks or sum(rows) != row_count:
        raise ValueError(f"all_to_all: {list(rows)} are not {row_count} rows for {ranks} ranks")
    bytes_per_row = tensor.nbytes // row_count if row_count else 0
    return [count * bytes_per_row for count in rows]


def _part_addresses(tensor: Tensor, parts: Sequence[int]) -> list[int]:
    """Return the addresses of a tensor's consecutive parts, given their bytes."""
    addresses, address = [], tensor.data_ptr()
    for part in parts:
        addresses.append(address)
        address += part
    return addresses
