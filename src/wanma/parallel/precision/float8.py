"""Matrix products of the blocks in fp8 (Micikevicius et al. 2022), by torchao with a scale per tensor.

Inputs, weights and gradients are scaled and cast for each product; weights, optimizer and all that lies
between the products stay as they are. It changes the numbers: such a plan is approximate. It needs a GPU
that multiplies fp8; on CPUs torchao can only pretend to, which is what the tests do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from wanma.job.errors import JobError, WanmaError, missing_extra_error
from wanma.job.plan.plan import Plan
from wanma.models.layers.lora import LoRALinear
from wanma.planner.rules.capabilities import FP8_MIN_COMPUTE_CAPABILITY

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

MATRIX_DIM_MULTIPLE = 16
"""Divisor of both dims of a matrix, on every rank, that fp8 products require, in elements."""


def apply_float8(blocks: list[nn.Module], plan: Plan, *, emulate: bool = False) -> None:
    """Make the linear layers of `blocks` compute in fp8, in place; before anything splits them.

    Layers whose dims do not suit, layers with adapters, and all modules outside the blocks stay as they are.

    Args:
        blocks: modules whose linear layers compute in fp8.
        plan: plan of the run.
        emulate: emulate fp8 products on a device that has none.

    Raises:
        WanmaError: torchao is not installed, this GPU has no products in fp8, or no layer suits.
    """
    config = _config(plan, emulate)
    if not emulate:
        _require_capability()
    from torchao.float8 import convert_to_float8_training

    is_supported = _linear_filter(plan)
    if not any(is_supported(module, name) for block in blocks for name, module in block.named_modules()):
        raise JobError(
            f"train.fp8: no linear layer of the blocks has both dims a multiple of {MATRIX_DIM_MULTIPLE} "
            "on every rank",
            "unset train.fp8, or choose other dimensions",
        )
    for block in blocks:
        convert_to_float8_training(block, config=config, module_filter_fn=is_supported)


def _config(plan: Plan, emulate: bool) -> Float8LinearConfig:
    try:
        from torchao.float8 import Float8LinearConfig
    except ImportError as error:
        raise missing_extra_error("torchao", "fp8", "train.fp8") from error
    # Weights that are gathered for every block and micro-batch are gathered in fp8. Those that `tp` splits
    # are cut and put together by other means than torchao's, as plain tensors.
    gathers = plan.shard == "parameters" and plan.tp == 1
    return Float8LinearConfig(enable_fsdp_float8_all_gather=gathers, emulate=emulate)


def _linear_filter(plan: Plan) -> Callable[[nn.Module, str], bool]:
    def suits(module: nn.Module, _: str) -> bool:
        if not isinstance(module, nn.Linear) or isinstance(module, LoRALinear):
            return False
        # `tp` splits one of the two; either may be it.
        return all(
            dim % (MATRIX_DIM_MULTIPLE * plan.tp) == 0 for dim in (module.in_features, module.out_features)
        )

    return suits


def _require_capability() -> None:
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    if capability < FP8_MIN_COMPUTE_CAPABILITY:
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "this device"
        raise WanmaError(
            f"train.fp8: {name} has compute capability {'.'.join(map(str, capability))}, but fp8 matrix "
            f"products need {'.'.join(map(str, FP8_MIN_COMPUTE_CAPABILITY))}",
            "unset train.fp8",
        )
