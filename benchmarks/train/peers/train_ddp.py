"""Training in plain PyTorch: DistributedDataParallel under torchrun.

As in https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html ("Initialize DDP with torchrun") and,
for bf16, https://docs.pytorch.org/docs/stable/amp.html (autocast, CPU). Compiled as
https://docs.pytorch.org/docs/stable/compile/programming_model.where_to_apply_compile.html says for DDP.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from benchmarks.train.workload import Workload, arguments, cross_entropy


def main() -> None:
    work = Workload(arguments())
    dist.init_process_group("gloo")
    if work.compile:
        work.model.compile()
    model = DistributedDataParallel(work.model)
    optimizer = work.adamw(model.parameters())
    for inputs, targets in work.loader(dist.get_rank(), dist.get_world_size()):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=work.bf16):
            loss = cross_entropy(model(inputs), targets)
        loss.backward()
        clip_grad_norm_(model.parameters(), work.train.gradient_clip)
        optimizer.step()
        work.step_done(loss)
    work.finish(optimizer=type(optimizer).__name__)


if __name__ == "__main__":
    main()
