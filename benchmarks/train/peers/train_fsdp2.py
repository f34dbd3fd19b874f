"""Training with PyTorch's FSDP2 under torchrun: parameters, gradients and optimizer state sharded.

As in https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html ("Model Initialization", "Mixed
Precision"): each block is sharded, then the root; the optimizer is made afterwards. Compiled per block, as
https://docs.pytorch.org/docs/stable/compile/programming_model.where_to_apply_compile.html advises for wrapped
modules.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_

from benchmarks.train.workload import Workload, arguments, cross_entropy


def main() -> None:
    work = Workload(arguments())
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if work.bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = work.model
    for block in model.get_submodule("layers").children():
        if work.compile:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = work.adamw(model.parameters())
    for inputs, targets in work.loader(dist.get_rank(), dist.get_world_size()):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        clip_grad_norm_(model.parameters(), work.train.gradient_clip)
        optimizer.step()
        work.step_done(loss)
    work.finish(optimizer=type(optimizer).__name__)


if __name__ == "__main__":
    main()
