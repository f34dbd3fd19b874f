"""Operators of torch without a public name: of ATen, of lists of tensors, and of c10d."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

foreach_norm = torch._foreach_norm
foreach_mul_ = torch._foreach_mul_
foreach_lerp_ = torch._foreach_lerp_
grouped_mm: Callable[..., Tensor] | None = getattr(torch, "_grouped_mm", None)
"""Product of groups of rows, each with its matrix; None in a torch without it."""

scaled_mm = torch.ops.aten._scaled_mm
aten_grouped_mm = torch.ops.aten._grouped_mm
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
cpu_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention
cudnn_attention = torch.ops.aten._scaled_dot_product_cudnn_attention
overrideable_attention = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
embedding_bag = torch.ops.aten._embedding_bag
embedding_bag_forward_only = torch.ops.aten._embedding_bag_forward_only
embedding_bag_backward = torch.ops.aten._embedding_bag_backward
sparse_coo_tensor = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors
unsafe_view = torch.ops.aten._unsafe_view
to_copy = torch.ops.aten._to_copy

FUSED_DROPOUT = "_fused_dropout"
NATIVE_BATCH_NORM_LEGIT = "_native_batch_norm_legit"
FUSED_RMS_NORM = "_fused_rms_norm"
FUSED_RMS_NORM_BACKWARD = "_fused_rms_norm_backward"
SOFTMAX = "_softmax"
SOFTMAX_BACKWARD = "_softmax_backward_data"
LOG_SOFTMAX = "_log_softmax"
LOG_SOFTMAX_BACKWARD = "_log_softmax_backward_data"
ADAPTIVE_AVG_POOL2D = "_adaptive_avg_pool2d"
ADAPTIVE_AVG_POOL3D = "_adaptive_avg_pool3d"
INDEX_PUT_IMPL = "_index_put_impl_".removesuffix("_")
"""Names of operators of ATen, without its namespace and the underscore of operators in place."""

FUNCTIONAL_COLLECTIVES = "_c10d_functional"
FUNCTIONAL_COLLECTIVES_WITH_AUTOGRAD = "_c10d_functional_autograd"
"""Namespaces of the collectives that return their result."""
ALL_GATHER_BASE = "_allgather_base_"
REDUCE_SCATTER_BASE = "_reduce_scatter_base_"
"""Names of c10d's operators for one tensor per rank."""

functional_collectives: Any = torch.ops._c10d_functional
"""Operators of functional collectives."""


def is_mkldnn_enabled() -> bool:
    return torch._C._get_mkldnn_enabled()


def set_mkldnn_enabled(is_enabled: bool) -> None:
    """Let operators use MKL-DNN or not; `torch.backends.mkldnn.flags` warns of settings of other devices."""
    torch._C._set_mkldnn_enabled(is_enabled)
