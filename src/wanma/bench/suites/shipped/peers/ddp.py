"""PyTorch DistributedDataParallel under torchrun.

https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html ("Initialize DDP with torchrun"),
https://docs.pytorch.org/docs/stable/amp.html (autocast), and of
https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html gradients as views of the buckets and
threads per rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from recipe import Recipe, cross_entropy, mean_of_ranks, plain_loader
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_


def main() -> None:
    recipe = Recipe()
    dist.init_process_group()
    devices = [recipe.device.index] if recipe.device.type == "cuda" else None
    model = DistributedDataParallel(
        recipe.model.to(recipe.device), device_ids=devices, gradient_as_bucket_view=True
    )
    optimizer = recipe.optimizer(model.parameters())
    for inputs, targets in recipe.batches(plain_loader(recipe)):
        optimizer.zero_grad()
        with torch.autocast(recipe.device.type, dtype=torch.bfloat16, enabled=recipe.bf16):
            loss = cross_entropy(model(inputs), targets)
        loss.backward()
        clip_grad_norm_(model.parameters(), recipe.train["gradient_clip"])
        optimizer.step()
        recipe.end_step(mean_of_ranks(loss))
    recipe.finish()


if __name__ == "__main__":
    main()
