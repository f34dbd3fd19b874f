"""Data-parallel training with Horovod, as its users write it for `horovodrun`, and a sum over the processes.

Each process prints the losses of its steps. With the argument `fails`, process 1 ends in an error after
the third step; with `dies`, it kills itself there, once in a folder.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import numpy
import torch
from torch import nn

GLOBAL_BATCH = 16
FEATURES = numpy.random.default_rng(0).normal(size=(64, 4)).astype(numpy.float32)
TARGETS = FEATURES.sum(axis=1, keepdims=True)


def main() -> None:
    hvd.init()
    rank, ranks, share = hvd.rank(), hvd.size(), GLOBAL_BATCH // hvd.size()
    total = hvd.allreduce(torch.tensor(rank + 1.0), op=hvd.Sum).item()
    model = nn.Linear(4, 1, bias=False)
    if rank == 0:
        nn.init.zeros_(model.weight)  # those of the others are random until they are broadcast
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    losses = []
    for step in range(1, 9):
        first = (step - 1) * GLOBAL_BATCH % 64 + rank * share
        features, targets = (torch.from_numpy(rows[first : first + share]) for rows in (FEATURES, TARGETS))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(features), targets)
        loss.backward()
        optimizer.step()
        losses.append(hvd.allreduce(loss.detach()).item())
        record(step=step, loss=losses[-1])
        if step == 3 and rank == 1:
            fail(sys.argv[1:])
    place = f"{hvd.local_rank()}/{hvd.local_size()} here, {hvd.cross_rank()}/{hvd.cross_size()} across"
    print(f"process {rank} of {ranks}, {place}: sum {total}, losses", *losses, flush=True)


def record(**values: float) -> None:
    """Append a line of metrics, as an interpreter without wanma does."""
    with Path(os.environ["WANMA_METRICS"]).open("a") as file:
        file.write(json.dumps({**values, "time": time.time()}) + "\n")


def fail(arguments: list[str]) -> None:
    if arguments == ["fails"]:
        raise ValueError("no such column: prize")
    if arguments == ["dies"] and not Path("died").exists():
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
