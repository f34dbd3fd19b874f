"""Cost of each ATen operator on a device: its matrix product, or the memory that it reads and writes.

A table by operator, and rules for all others. Kernels are those of GPU libraries, whatever device the
traced tensors are on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from wanma.job.forecast.operators import Kind, Phase

aten = torch.ops.aten


@dataclass(frozen=True)
class Work:
    """Kernel, or a few that belong together, with its inputs and outputs; sizes are of the whole call."""

    kind: Kind
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]
    kernels: int = 1
    passes: int = 1
    """Number of times that the inputs are read."""
    phase: Phase | None = None
    """Phase of the kernel; None: that of the running pass."""
    product: tuple[float, float, float, float] | None = None
    """Matrix product: m, n, k, count."""
    attention: AttentionCall | None = None
    moved_rows: tuple[Tensor, float, float] | None = None
    """Lookup: indices, elements of each index's row, and how often these are moved."""


@dataclass(frozen=True)
class AttentionCall:
    """Attention call: shapes (batch, heads, sequence, width) of query, key and value."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    causal: bool


def work_of(operator: Any, arguments: Sequence[Any], keywords: dict[str, Any], result: Any) -> list[Work]:
    """Return the kernels of one call; none for views, and for memory that is only allocated."""
    if operator.namespace != "aten" or operator in _NO_KERNEL:
        return []
    if operator in _TABLE:
        return list(_TABLE[operator](arguments, keywords, result))
    inputs, outputs = _tensors((arguments, keywords)), _tensors(result)
    if any(tensor.layout is not torch.strided for tensor in (*inputs, *outputs)):
        return []  # sparse gradients: `_embedding_bag_backward` counts their kernels
    mutated = _mutated(operator, arguments)
    sources = {_storage(tensor) for tensor in inputs}
    if not mutated and all(_storage(tensor) in sources for tensor in outputs):
        return []
    reads = inputs
    if operator in _OVERWRITES:
        reads = tuple(tensor for tensor in inputs if all(tensor is not other for other in mutated))
    kind, kernels, passes = _kind(operator)
    return [Work(kind, reads, mutated or outputs, kernels, passes)]


def _mutated(operator: Any, arguments: Sequence[Any]) -> tuple[Tensor, ...]:
    schema = operator._schema
    if not schema.is_mutable:
        return ()
    written = (
        value
        for argument, value in zip(schema.arguments, arguments, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return _tensors(list(written))


def _kind(operator: Any) -> tuple[Kind, int, int]:
    """Return kind, number of kernels, and number of times that the inputs are read."""
    name = operator._schema.name.removeprefix("aten::").rstrip("_")
    if name in _NORMALISATIONS:
        return ("normalisation", *_NORMALISATIONS[name])
    if name in _REDUCTIONS:
        return "reduction", 1, 1
    if name in _GATHERS:
        return "gather", 1, 1
    return "elementwise", 1, 1


def _products(operator: Any, first: int) -> Any:
    """Return the table entry of a product of matrices, or batches of them, from argument `first` on."""

    def work(arguments: Sequence[Any], _: dict[str, Any], result: Any) -> list[Work]:
        left, right = arguments[first], arguments[first + 1]
        *batch, m, k = left.shape
        product = (float(m), float(right.shape[-1]), float(k), float(math.prod(batch)))
        return [Work("product", _tensors(arguments), _tensors(result), product=product)]

    return operator, work


def _convolution(arguments: Sequence[Any], _: dict[str, Any], result: Any) -> list[Work]:
    images, weight = arguments[0], arguments[1]
    transposed, groups = arguments[6], arguments[8]
    product = _forward_product(images, weight, result, transposed, groups)
    return [Work("convolution", _tensors(arguments), (result,), product=product)]


def _convolution_backward(arguments: Sequence[Any], _: dict[str, Any], result: Any) -> list[Work]:
    gradient, images, weight = arguments[:3]
    transposed, groups, (of_inputs, of_weights, of_bias) = arguments[7], arguments[9], arguments[10]
    m, n, k, count = _forward_product(images, weight, gradient, transposed, groups)
    found = []
    if of_inputs:
        # Again as many products, of one row for each pixel of the input.
        pixels = float(images.shape[0] * math.prod(images.shape[2:]))
        channels = images.shape[1] / groups
        product = (pixels, channels, m * n * k / (pixels * channels), count)
        found.append(Work("convolution", (gradient, weight), (result[0],), phase="inputs", product=product))
    if of_weights:
        product = (k, n, m, count)
        found.append(Work("convolution", (gradient, images), (result[1],), phase="weights", product=product))
    if of_bias:
        found.append(Work("reduction", (gradient,), (result[2],), phase="weights"))
    return found


def _forward_product(
    images: Tensor, weight: Tensor, result: Tensor, transposed: bool, groups: int
) -> tuple[float, float, float, float]:
    """Return m, n, k, count: rows are the output's pixels (transposed: the input's), columns channels."""
    window = math.prod(weight.shape[2:])
    if transposed:
        pixels = images.shape[0] * math.prod(images.shape[2:])
        return float(pixels), float(weight.shape[1] * window), images.shape[1] / groups, float(groups)
    pixels = result.shape[0] * math.prod(result.shape[2:])
    return float(pixels), weight.shape[0] / groups, float(weight.shape[1] * window), float(groups)


def _attention(arguments: Sequence[Any], keywords: dict[str, Any], result: Any) -> list[Work]:
    """Return the kernel of attention; options are dropout, is_causal, which torch omits at their defaults."""
    query, key, value, *options = arguments
    causal = bool(options[1]) if len(options) > 1 else bool(keywords.get("is_causal", False))
    call = AttentionCall(tuple(query.shape), tuple(key.shape), tuple(value.shape), causal)
    return [Work("attention", (query, key, value), _tensors(result), attention=call)]


def _attention_backward(arguments: Sequence[Any], _: dict[str, Any], result: Any) -> list[Work]:
    query, key, value = arguments[1:4]
    causal = next((bool(option) for option in arguments[6:] if isinstance(option, bool)), False)
    call = AttentionCall(tuple(query.shape), tuple(key.shape), tuple(value.shape), causal)
    return [Work("attention", _tensors(arguments[:6]), _tensors(result), phase="inputs", attention=call)]


def _lookup(arguments: Sequence[Any], _: dict[str, Any], result: Any) -> list[Work]:
    """Return the kernel of embeddings and bags of them: it reads only the requested rows of the table."""
    table, indices = arguments[:2]
    found = result[0] if isinstance(result, tuple) else result
    return [Work("lookup", (indices,), (found,), moved_rows=(indices, float(table.shape[-1]), 1.0))]


_SORT_KERNELS = 8
"""Number of kernels that sort indices, so that the gradients of one row are added by one thread."""
_SORT_PASSES = 8
"""Number of passes of the sort over the indices, 8 bits at a time."""


def _lookup_backward(arguments: Sequence[Any], _: dict[str, Any], result: Any) -> list[Work]:
    """Return the kernels of a dense gradient of the table: zero except for the requested rows."""
    gradient, indices = arguments[:2]
    rows = (indices, float(gradient.shape[-1]), 2.0)
    sort = Work("gather", (indices,), (), _SORT_KERNELS, _SORT_PASSES, phase="weights")
    return [sort, Work("lookup", (gradient,), (result,), 2, phase="weights", moved_rows=rows)]


def _sparse_gradient(arguments: Sequence[Any], _: dict[str, Any], __: Any) -> list[Work]:
    """Return the kernels of the gradient of nn.Embedding(sparse=True): a list of rows."""
    indices, values = arguments[3:5]
    return _sparse_rows(values, indices)


def _bag_backward(arguments: Sequence[Any], keywords: dict[str, Any], result: Any) -> list[Work]:
    if bool(arguments[9]):
        return _sparse_rows(*arguments[:2])
    return _lookup_backward(arguments, keywords, result)


def _sparse_rows(gradient: Tensor, indices: Tensor) -> list[Work]:
    # One gradient for each index; equal rows are sorted and added up, and the table's rows changed.
    rows = (indices, float(gradient.shape[-1]), 5.0)
    sort = Work("gather", (indices,), (), _SORT_KERNELS, _SORT_PASSES, phase="weights")
    return [sort, Work("lookup", (gradient,), (), 4, phase="weights", moved_rows=rows)]


_TABLE: dict[Any, Any] = dict(
    [
        _products(aten.mm.default, 0),
        _products(aten.bmm.default, 0),
        _products(aten.addmm.default, 1),
        _products(aten.baddbmm.default, 1),
        (aten.convolution.default, _convolution),
        (aten.convolution_backward.default, _convolution_backward),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, _attention),
        (aten._scaled_dot_product_flash_attention_for_cpu_backward.default, _attention_backward),
        (aten.embedding.default, _lookup),
        (aten._embedding_bag.default, _lookup),
        (aten._embedding_bag_forward_only.default, _lookup),
        (aten.embedding_dense_backward.default, _lookup_backward),
        (aten._sparse_coo_tensor_with_dims_and_tensors.default, _sparse_gradient),
        (aten._embedding_bag_backward.default, _bag_backward),
    ]
)

_NO_KERNEL = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_strided.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
        aten.detach.default,
        aten.lift_fresh.default,
        aten._unsafe_view.default,
    }
)
"""Operators without a kernel that the comparison of storages does not recognise as views."""

_OVERWRITES = frozenset(
    {
        aten.copy_.default,
        aten.fill_.Scalar,
        aten.fill_.Tensor,
        aten.zero_.default,
        aten.bernoulli_.float,
        aten.normal_.default,
        aten.uniform_.default,
        aten.random_.default,
    }
)
"""Operators that change a tensor without reading it."""

_NORMALISATIONS = {
    # Kernels, and times that the inputs are read: statistics first, unless they fit a block of threads.
    "native_batch_norm": (2, 2),
    "_native_batch_norm_legit": (2, 2),
    "cudnn_batch_norm": (2, 2),
    "native_batch_norm_backward": (2, 2),
    "native_group_norm": (2, 2),
    "native_group_norm_backward": (3, 2),
    "native_layer_norm": (1, 1),
    "native_layer_norm_backward": (2, 2),
    "_fused_rms_norm": (1, 1),
    "_fused_rms_norm_backward": (2, 2),
    "_softmax": (1, 1),
    "_softmax_backward_data": (1, 1),
    "_log_softmax": (1, 1),
    "_log_softmax_backward_data": (1, 1),
}

_REDUCTIONS = frozenset(
    """
    sum mean var var_mean std norm linalg_vector_norm amax amin argmax argmin max min prod any all logsumexp
    cumsum cumprod max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d
    max_pool3d_with_indices avg_pool3d _adaptive_avg_pool3d nll_loss_forward nll_loss2d_forward
    """.split()  # noqa: SIM905  # reads better than a list
)

_GATHERS = frozenset(
    """
    gather scatter scatter_add index index_put _index_put_impl index_select index_add index_copy take sort
    topk max_pool2d_with_indices_backward max_pool3d_with_indices_backward masked_select unique2 roll flip
    repeat
    """.split()  # noqa: SIM905
)


def _tensors(tree: Any) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _storage(tensor: Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata
    return identity
