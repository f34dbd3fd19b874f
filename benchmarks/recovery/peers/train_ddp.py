"""DistributedDataParallel under torchrun, with checkpoints from which a restart continues.

As in https://docs.pytorch.org/tutorials/beginner/ddp_series_fault_tolerance.html, at its best for this
failure: a checkpoint is copied into memory and written by a thread beside the training, renamed when it is
complete, and never synchronized with the disk, since a killed process leaves the page cache intact.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.recovery.peers.common import Progress, Task, arguments, leave

MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def main() -> None:
    options = arguments(every=True)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    progress = Progress(options.progress, rank, int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    task = Task(options.task)
    module = task.model()
    optimizer = task.adamw(module)
    first = restore(options.checkpoint, module, optimizer)
    model = DistributedDataParallel(module)
    saver = Saver(options.checkpoint) if rank == 0 else None
    for step in range(first, task.steps):
        optimizer.zero_grad()
        loss = task.loss(model, step, rank)
        loss.backward()
        task.clip(model)
        optimizer.step()
        progress.step(step + 1, loss)
        if saver is not None and (step + 1) % options.every == 0:
            saver.save(step + 1, module, optimizer)
    if saver is not None:
        saver.wait()
    dist.barrier()
    leave(options.progress, rank, module, optimizer)


def restore(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load weights and moments from the checkpoint, if there is one; return the steps done in it."""
    if not path.exists():
        return 0
    saved = torch.load(path, mmap=True)
    module.load_state_dict(saved["weights"])
    for parameter, values in zip(module.parameters(), saved["moments"], strict=True):
        optimizer.state[parameter] = dict(zip(MOMENTS, (value.clone() for value in values), strict=True))
    return int(saved["step"])


class Saver:
    """Writer of one checkpoint at a time beside the training; the next waits for the one before."""

    def __init__(self, path: Path) -> None:
        torch.serialization.set_crc32_options(False)
        self._path = path
        self._thread = ThreadPoolExecutor(1)
        self._copies: list[Tensor] = []
        self._under_way: Future[None] | None = None

    def save(self, step: int, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.wait()
        weights = module.state_dict()
        moments = [[optimizer.state[parameter][key] for key in MOMENTS] for parameter in module.parameters()]
        tensors = [*weights.values(), *(value for values in moments for value in values)]
        if not self._copies:
            self._copies = [torch.empty_like(tensor) for tensor in tensors]
        torch._foreach_copy_(self._copies, tensors)
        copies = iter(self._copies)
        copied = {
            "step": step,
            "weights": {name: next(copies) for name in weights},
            "moments": [[next(copies) for _ in MOMENTS] for _ in moments],
        }
        self._under_way = self._thread.submit(self._write, copied)

    def wait(self) -> None:
        if self._under_way is not None:
            self._under_way.result()

    def _write(self, copied: dict[str, object]) -> None:
        partial = self._path.with_suffix(".partial")
        torch.save(copied, partial)
        partial.replace(self._path)


if __name__ == "__main__":
    main()
