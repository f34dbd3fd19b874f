"""Replica of torchft's fault-tolerant data-parallel training, in a process of its own.

As in https://github.com/meta-pytorch/torchft/blob/main/train_ddp.py. Without a lost replica the others have
fewer samples per step; when it is back, it loads the state of a living one. The data of a step follow from
the number of committed steps, as in the other contenders.

Gradients are averaged by the manager itself, in one piece after the backward pass: the DDP of torchft 0.2.0
ends the survivors too (`assert fut._fut`) when a peer dies within the backward pass.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchft import (  # type: ignore[import-not-found]  # only in the peers' environment
    Manager,
    Optimizer,
    ProcessGroupGloo,
)

from benchmarks.recovery.peers.common import Progress, Task, arguments, leave


def main() -> None:
    options = arguments()
    replica, replicas = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
    generation = int(os.environ["GENERATION"])
    progress = Progress(options.progress, replica, generation)
    task = Task(options.task)
    module = task.model()
    inner = task.adamw(module)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]

    def load(state: dict[str, dict[str, object]]) -> None:
        module.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=load,
        state_dict=lambda: {"model": module.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        replica_id=f"replica_{replica}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        timeout=timedelta(seconds=20),
        init_sync=False,  # all begin with the same weights
    )
    optimizer = Optimizer(manager, inner)
    gradients = _in_one_piece(module)
    over = options.progress / "over"
    if generation == 0:
        _meet(options.progress, replica, replicas)
    while (done := manager.current_step()) < task.steps and not over.exists():
        optimizer.zero_grad(set_to_none=False)
        loss = task.loss(module, min(done, task.steps - 1), replica)
        loss.backward()
        manager.allreduce(gradients).wait()
        task.clip(module)
        optimizer.step()
        step = manager.current_step()
        progress.step(step, loss, committed=step > done, participants=manager.num_participants())
    over.touch()  # a replica that comes back when the others are through must not train by itself
    manager.shutdown(wait=False)
    leave(options.progress, replica, module, inner)


def _in_one_piece(module: nn.Module) -> Tensor:
    """Return a buffer of which every parameter's gradient is a part."""
    parameters = list(module.parameters())
    whole = torch.zeros(sum(parameter.numel() for parameter in parameters))
    for parameter, part in zip(parameters, whole.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    return whole


def _meet(folder: Path, replica: int, replicas: int) -> None:
    """Wait until all replicas are ready: else the first would train some steps without the others."""
    (folder / f"ready-{replica}").touch()
    while len(list(folder.glob("ready-*"))) < replicas:
        time.sleep(0.01)


if __name__ == "__main__":
    main()
