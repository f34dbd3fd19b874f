"""PyTorch FSDP2 under torchrun: parameters, gradients and optimizer state sharded.

https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html ("Model Initialization",
"Mixed Precision"): each block is sharded, then the root; the optimizer is made afterwards.
"""

from __future__ import annotations

import torch
from recipe import Recipe, cross_entropy, mean_of_ranks, plain_loader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_


def main() -> None:
    recipe = Recipe()
    mesh = init_device_mesh(recipe.device.type, (recipe.ranks,))
    policy = MixedPrecisionPolicy()
    if recipe.bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = recipe.model.to(recipe.device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = recipe.optimizer(model.parameters())
    for inputs, targets in recipe.batches(plain_loader(recipe)):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        clip_grad_norm_(model.parameters(), recipe.train["gradient_clip"])
        optimizer.step()
        recipe.end_step(mean_of_ranks(loss))
    recipe.finish()


if __name__ == "__main__":
    main()
