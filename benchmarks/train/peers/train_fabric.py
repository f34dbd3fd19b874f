"""Training with Lightning Fabric and its DDP strategy (its FSDP strategy refuses CPUs).

As in https://lightning.ai/docs/fabric/stable/fundamentals/convert.html; compiled before `setup`, as in
https://lightning.ai/docs/fabric/stable/advanced/compile.html; clipped by `fabric.clip_gradients`.
"""

from __future__ import annotations

import os

import torch
from lightning.fabric import Fabric  # type: ignore[import-not-found]  # only in the peers' environment

from benchmarks.train.workload import Workload, arguments, cross_entropy


def main() -> None:
    work = Workload(arguments())
    fabric = Fabric(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),  # as torchrun started them
        strategy="ddp",
        precision="bf16-mixed" if work.bf16 else "32-true",
    )
    fabric.launch()
    raw = torch.compile(work.model) if work.compile else work.model
    model, optimizer = fabric.setup(raw, work.adamw(work.model.parameters()))
    # Each rank already has its own rows, the same as in the other contenders.
    loader = fabric.setup_dataloaders(
        work.loader(fabric.global_rank, fabric.world_size), use_distributed_sampler=False
    )
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=work.train.gradient_clip)
        optimizer.step()
        work.step_done(loss)
    work.finish(optimizer=type(optimizer.optimizer).__name__)


if __name__ == "__main__":
    main()
