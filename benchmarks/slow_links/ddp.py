"""Training in plain PyTorch: DistributedDataParallel under torchrun.

As in https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html ("Initialize DDP with torchrun") and,
for bf16, https://docs.pytorch.org/docs/stable/amp.html (autocast, CPU).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from benchmarks.workload import Workload, arguments


def main() -> None:
    work = Workload(arguments())
    dist.init_process_group("gloo")
    model = DistributedDataParallel(work.model)
    optimizer = work.adamw(model.parameters())
    for inputs, targets in work.loader(dist.get_rank(), dist.get_world_size()):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=work.bf16):
            loss = F.cross_entropy(model(inputs).float().flatten(0, -2), targets.flatten())
        loss.backward()
        clip_grad_norm_(model.parameters(), work.train.gradient_clip)
        optimizer.step()
        work.step_done(loss)
    work.finish(optimizer=type(optimizer).__name__)


if __name__ == "__main__":
    main()
