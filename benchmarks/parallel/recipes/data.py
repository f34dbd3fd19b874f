"""Data parallelism in plain torch: DDP, ZeRO-2 and ZeRO-3.

torchtitan 0.2.2, models/llama3/infra/parallelize.py: `apply_ddp` (buckets of 100 MB), and `apply_fsdp` with
reshard_after_forward_policy "never" (ZeRO-2) or "default" (ZeRO-3). bf16 under DDP is autocast, as
distributed/utils.py's `maybe_enable_amp`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.parallel.recipes.common import clip, loss_share, shard
from benchmarks.workload import Workload, arguments


def main() -> None:
    work = Workload(arguments())
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("data",))
    is_replicated = work.parallel.shard is None
    if is_replicated:
        replicate(work.model, device_mesh=mesh, bucket_cap_mb=100)
    else:
        shard(work.model, mesh, bf16=work.bf16, reshard=work.parallel.shard == "parameters")
    # DDP divides the sum of gradients by the ranks, and then the loss is the mean of a rank's tokens.
    sharers = 1 if is_replicated else ranks
    optimizer = work.adamw(work.model.parameters())
    for inputs, targets in work.loader(dist.get_rank(), ranks):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=work.bf16 and is_replicated):
            loss = loss_share(work.model(inputs), targets, targets.numel() * sharers)
        loss.backward()
        clip([work.model.parameters()], work.train.gradient_clip)
        optimizer.step()
        work.step_done(loss)
    work.finish(divisor=ranks // sharers, optimizer=type(optimizer).__name__)


if __name__ == "__main__":
    main()
