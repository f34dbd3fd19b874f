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

from wanma.job.forecast.operators import OperatorKind, OperatorPhase
from wanma.torch_internals import operators
from wanma.torch_internals.autograd import storage_id
from wanma.torch_internals.dispatch import operator_schema, tree_leaves

aten = torch.ops.aten


@dataclass(frozen=True)
class KernelCall:
    """Kernel, or a few that belong together, with its inputs and outputs; sizes are of the whole call."""

    kind: OperatorKind
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]
    kernel_count: int = 1
    input_passes: int = 1
    """Number of times that the inputs are read."""
    phase: OperatorPhase | None = None
    """Phase of the kernel; None: that of the running pass."""
    matmul: tuple[float, float, float, float] | None = None
    """Matrix product: m, n, k, count."""
    attention: AttentionShape | None = None
    gathered_rows: tuple[Tensor, float, float] | None = None
    """Lookup: indices, elements of each index's row, and how often these are moved."""


@dataclass(frozen=True)
class AttentionShape:
    """Attention call: shapes (batch, heads, sequence, width) of query, key and value."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    is_causal: bool


def list_kernel_calls(
    operator: Any, arguments: Sequence[Any], keywords: dict[str, Any], result: Any
) -> list[KernelCall]:
    """Return the kernels of one call; none for views, and for memory that is only allocated."""
    if operator.namespace != "aten" or operator in _FREE_OPERATORS:
        return []
    if operator in _KERNEL_RULES:
        return list(_KERNEL_RULES[operator](arguments, keywords, result))
    inputs, outputs = _tensors((arguments, keywords)), _tensors(result)
    if any(tensor.layout is not torch.strided for tensor in (*inputs, *outputs)):
        return []  # sparse gradients: `_bag_backward` counts their kernels
    mutated = _written_tensors(operator, arguments)
    sources = {storage_id(tensor) for tensor in inputs}
    if not mutated and all(storage_id(tensor) in sources for tensor in outputs):
        return []
    reads = inputs
    if operator in _WRITE_ONLY_OPERATORS:
        reads = tuple(tensor for tensor in inputs if all(tensor is not written for written in mutated))
    kind, kernel_count, input_passes = _operator_kind(operator)
    return [KernelCall(kind, reads, mutated or outputs, kernel_count, input_passes)]


def _written_tensors(operator: Any, arguments: Sequence[Any]) -> tuple[Tensor, ...]:
    schema = operator_schema(operator)
    if not schema.is_mutable:
        return ()
    written = (
        value
        for argument, value in zip(schema.arguments, arguments, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return _tensors(list(written))


def _operator_kind(operator: Any) -> tuple[OperatorKind, int, int]:
    """Return kind, number of kernels, and number of times that the inputs are read."""
    name = operator_schema(operator).name.removeprefix("aten::").rstrip("_")
    if name in _NORMALIZATION_COSTS:
        return ("normalisation", *_NORMALIZATION_COSTS[name])
    if name in _REDUCTION_OPERATORS:
        return "reduction", 1, 1
    if name in _GATHER_OPERATORS:
        return "gather", 1, 1
    return "elementwise", 1, 1


def _matmul_rule(operator: Any, first_matrix: int) -> Any:
    """Return the table entry of a (batched) product of matrices, from argument `first_matrix` on."""

    def work(arguments: Sequence[Any], _: dict[str, Any], result: Any) -> list[KernelCall]:
        left, right = arguments[first_matrix], arguments[first_matrix + 1]
        *batch, m, k = left.shape
        product = (float(m), float(right.shape[-1]), float(k), float(math.prod(batch)))
        return [KernelCall("product", _tensors(arguments), _tensors(result), matmul=product)]

    return operator, work


def _convolution(arguments: Sequence[Any], _: dict[str, Any], result: Any) -> list[KernelCall]:
    images, weight = arguments[0], arguments[1]
    transposed, groups = arguments[6], arguments[8]
    product = _forward_product(images, weight, result, transposed, groups)
    return [KernelCall("convolution", _tensors(arguments), (result,), matmul=product)]


def _convolution_backward(arguments: Sequence[Any], _: dict[str, Any], result: Any) -> list[KernelCall]:
    gradient, images, weight = arguments[:3]
    transposed, groups, (needs_input, needs_weight, needs_bias) = arguments[7], arguments[9], arguments[10]
    m, n, k, count = _forward_product(images, weight, gradient, transposed, groups)
    calls = []
    if needs_input:
        # Again as many products, of one row for each pixel of the input.
        pixels = float(images.shape[0] * math.prod(images.shape[2:]))
        channels = images.shape[1] / groups
        product = (pixels, channels, m * n * k / (pixels * channels), count)
        calls.append(
            KernelCall("convolution", (gradient, weight), (result[0],), phase="inputs", matmul=product)
        )
    if needs_weight:
        product = (k, n, m, count)
        calls.append(
            KernelCall("convolution", (gradient, images), (result[1],), phase="weights", matmul=product)
        )
    if needs_bias:
        calls.append(KernelCall("reduction", (gradient,), (result[2],), phase="weights"))
    return calls


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


def _attention(arguments: Sequence[Any], keywords: dict[str, Any], result: Any) -> list[KernelCall]:
    """Return the kernel of attention; options are dropout, is_causal, which torch omits at their defaults."""
    query, key, value, *options = arguments
    causal = bool(options[1]) if len(options) > 1 else bool(keywords.get("is_causal", False))
    call = AttentionShape(tuple(query.shape), tuple(key.shape), tuple(value.shape), causal)
    return [KernelCall("attention", (query, key, value), _tensors(result), attention=call)]


def _attention_backward(arguments: Sequence[Any], _: dict[str, Any], result: Any) -> list[KernelCall]:
    query, key, value = arguments[1:4]
    causal = next((bool(option) for option in arguments[6:] if isinstance(option, bool)), False)
    call = AttentionShape(tuple(query.shape), tuple(key.shape), tuple(value.shape), causal)
    return [
        KernelCall("attention", _tensors(arguments[:6]), _tensors(result), phase="inputs", attention=call)
    ]


def _lookup(arguments: Sequence[Any], _: dict[str, Any], result: Any) -> list[KernelCall]:
    """Return the kernel of embeddings and bags of them: it reads only the requested rows of the table."""
    table, indices = arguments[:2]
    output = result[0] if isinstance(result, tuple) else result
    return [KernelCall("lookup", (indices,), (output,), gathered_rows=(indices, float(table.shape[-1]), 1.0))]


_SORT_KERNELS = 8
"""Number of kernels that sort indices, so that the gradients of one row are added by one thread."""
_SORT_PASSES = 8
"""Number of passes of the sort over the indices, 8 bits at a time."""


def _lookup_backward(arguments: Sequence[Any], _: dict[str, Any], result: Any) -> list[KernelCall]:
    """Return the kernels of a dense gradient of the table: zero except for the requested rows."""
    gradient, indices = arguments[:2]
    rows = (indices, float(gradient.shape[-1]), 2.0)
    sort = KernelCall("gather", (indices,), (), _SORT_KERNELS, _SORT_PASSES, phase="weights")
    return [sort, KernelCall("lookup", (gradient,), (result,), 2, phase="weights", gathered_rows=rows)]


def _sparse_gradient(arguments: Sequence[Any], _: dict[str, Any], __: Any) -> list[KernelCall]:
    """Return the kernels of the gradient of nn.Embedding(sparse=True): a list of rows."""
    indices, values = arguments[3:5]
    return _sparse_rows(values, indices)


def _bag_backward(arguments: Sequence[Any], keywords: dict[str, Any], result: Any) -> list[KernelCall]:
    if bool(arguments[9]):
        return _sparse_rows(*arguments[:2])
    return _lookup_backward(arguments, keywords, result)


def _sparse_rows(gradient: Tensor, indices: Tensor) -> list[KernelCall]:
    # One gradient for each index; equal rows are sorted and added up, and the table's rows changed.
    rows = (indices, float(gradient.shape[-1]), 5.0)
    sort = KernelCall("gather", (indices,), (), _SORT_KERNELS, _SORT_PASSES, phase="weights")
    return [sort, KernelCall("lookup", (gradient,), (), 4, phase="weights", gathered_rows=rows)]


_KERNEL_RULES: dict[Any, Any] = dict(
    [
        _matmul_rule(aten.mm.default, 0),
        _matmul_rule(aten.bmm.default, 0),
        _matmul_rule(aten.addmm.default, 1),
        _matmul_rule(aten.baddbmm.default, 1),
        (aten.convolution.default, _convolution),
        (aten.convolution_backward.default, _convolution_backward),
        (operators.cpu_flash_attention.default, _attention),
        (operators.cpu_flash_attention_backward.default, _attention_backward),
        (aten.embedding.default, _lookup),
        (operators.embedding_bag.default, _lookup),
        (operators.embedding_bag_forward_only.default, _lookup),
        (aten.embedding_dense_backward.default, _lookup_backward),
        (operators.sparse_coo_tensor.default, _sparse_gradient),
        (operators.embedding_bag_backward.default, _bag_backward),
    ]
)

_FREE_OPERATORS = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_strided.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
        aten.detach.default,
        aten.lift_fresh.default,
        operators.unsafe_view.default,
    }
)
"""Operators without a kernel that the comparison of storages does not recognize as views."""

_WRITE_ONLY_OPERATORS = frozenset(
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

_NORMALIZATION_COSTS = {
    # Kernels, and times that the inputs are read: statistics first, unless they fit a block of threads.
    "native_batch_norm": (2, 2),
    operators.NATIVE_BATCH_NORM_LEGIT: (2, 2),
    "cudnn_batch_norm": (2, 2),
    "native_batch_norm_backward": (2, 2),
    "native_group_norm": (2, 2),
    "native_group_norm_backward": (3, 2),
    "native_layer_norm": (1, 1),
    "native_layer_norm_backward": (2, 2),
    operators.FUSED_RMS_NORM: (1, 1),
    operators.FUSED_RMS_NORM_BACKWARD: (2, 2),
    operators.SOFTMAX: (1, 1),
    operators.SOFTMAX_BACKWARD: (1, 1),
    operators.LOG_SOFTMAX: (1, 1),
    operators.LOG_SOFTMAX_BACKWARD: (1, 1),
}

_REDUCTION_OPERATORS = frozenset(
    """
    sum mean var var_mean std norm linalg_vector_norm amax amin argmax argmin max min prod any all logsumexp
    cumsum cumprod max_pool2d_with_indices avg_pool2d adaptive_max_pool2d
    max_pool3d_with_indices avg_pool3d nll_loss_forward nll_loss2d_forward
    """.split()  # noqa: SIM905  # reads better than a list
) | {operators.ADAPTIVE_AVG_POOL2D, operators.ADAPTIVE_AVG_POOL3D}

_GATHER_OPERATORS = frozenset(
    """
    gather scatter scatter_add index index_put index_select index_add index_copy take sort
    topk max_pool2d_with_indices_backward max_pool3d_with_indices_backward masked_select unique2 roll flip
    repeat
    """.split()  # noqa: SIM905
) | {operators.INDEX_PUT_IMPL}


def _tensors(tree: Any) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
