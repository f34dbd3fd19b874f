"""Parts of torchtitan's training step, common to all mesh dimensions (0.2.2: train.py, train_step)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def loss_share(logits: Tensor, targets: Tensor, tokens: int) -> Tensor:
    """Return the summed losses over the tokens of the global batch.

    Source: components/loss.py, and train.py, which divides.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum") / tokens


def clip(
    groups: Iterable[Iterable[nn.Parameter]], max_norm: float, stages: dist.ProcessGroup | None = None
) -> None:
    """Clip gradients by one norm over all mesh dimensions, foreach.

    Source: distributed/utils.py, clip_grad_norm_.

    Args:
        groups: parameters of one mesh each.
        stages: ranks that hold other parameters.
    """
    lists = [list(group) for group in groups]
    norms = []
    for parameters in lists:
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = norms[0] if len(norms) == 1 else torch.stack(norms).square().sum().sqrt()
    if stages is not None:
        total = total.square()
        dist.all_reduce(total, group=stages)
        total = total.sqrt()
    for parameters in lists:
        clip_grads_with_norm_(parameters, max_norm, total, foreach=True)


def mixed_precision(bf16: bool) -> MixedPrecisionPolicy:
    """Return the precision policy of train.py's training.mixed_precision_param and _reduce."""
    kind = torch.bfloat16 if bf16 else torch.float32
    return MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32)


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    bf16: bool,
    reshard: bool,
    experts: dict[nn.Module, nn.Module] | None = None,
    expert_mesh: DeviceMesh | None = None,
) -> None:
    """Shard the model with FSDP2.

    Source: models/llama3/infra/parallelize.py, apply_fsdp; with experts, that of models/llama4.

    Args:
        reshard: free parameters after a block's forward; else keep them for its backward.
        experts: modules that `expert_mesh` shards, by block.
    """
    policy = mixed_precision(bf16)
    fully_shard(model.get_submodule("embedding"), mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    for block in model.get_submodule("layers").children():
        if experts is not None and block in experts:
            fully_shard(experts[block], mesh=expert_mesh, mp_policy=policy, reshard_after_forward=reshard)
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    ends = [model.get_submodule("norm"), model.get_submodule("head")]
    fully_shard(ends, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # disable_fsdp_gradient_division
            module.set_force_sum_reduction_for_comms(True)  # Gloo cannot multiply while it sums
