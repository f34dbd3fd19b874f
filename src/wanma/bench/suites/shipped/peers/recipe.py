"""Common parts of the recipes on PyTorch: the job, and the line of a step."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from decoder import Decoder, Samples
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler


class Recipe:
    """Model, data and optimizer of the job that the suite gives as the only argument, as JSON."""

    def __init__(self) -> None:
        job: dict[str, Any] = json.loads(sys.argv[1])
        self.train: dict[str, Any] = job["train"]
        self.bf16 = self.train["precision"] == "bf16"
        self.ranks, self.rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        self.batch = self.train["global_batch"] // self.ranks
        self.model = Decoder(**job["model"]["arguments"])
        self.samples = Samples(**job["data"]["arguments"])
        if self.train["global_batch"] % self.ranks or len(self.samples) % self.train["global_batch"]:
            sys.exit("the ranks must divide train.global_batch, and it the number of samples")
        local = int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._before = time.perf_counter()

    def optimizer(self, parameters: Iterable[Tensor]) -> torch.optim.AdamW:
        """Return AdamW with its fused kernel, the fastest of torch."""
        train = self.train
        return torch.optim.AdamW(
            parameters,
            lr=train["learning_rate"],
            betas=tuple(train["betas"]),
            eps=train["epsilon"],
            weight_decay=train["weight_decay"],
            fused=True,
        )

    def batches(self, loader: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the inputs and targets of each step, over as many epochs as it takes, on the device."""
        left = self.train["steps"]
        self._before = time.perf_counter()
        while True:
            for inputs, targets in loader:
                if left == 0:
                    return
                left -= 1
                yield inputs.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)

    def end_step(self, mean_loss: Tensor | float) -> None:
        """Print the line of a step, on rank 0; reading the loss waits for the device."""
        loss, now = float(mean_loss), time.perf_counter()
        samples = self.train["global_batch"]
        targets = samples * self.samples.rows[0, 1:].numel()
        if self.rank == 0:
            seconds = now - self._before
            print(
                f"wanma step loss {loss:.8g} samples {samples} targets {targets} seconds {seconds:.6f}",
                flush=True,
            )
        self._before = now

    def finish(self) -> NoReturn:
        """Print the number of threads of a rank, and end the process.

        It ends without destructors: those of torch may wait for each other, one that frees a process group
        of Gloo with the lock of Python, and a thread of Gloo for this lock.
        """
        if self.rank == 0:
            print(f"wanma figure threads_per_rank {torch.get_num_threads()}", flush=True)
        dist.destroy_process_group()
        os._exit(0)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over the targets, in fp32."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def mean_of_ranks(loss: Tensor) -> Tensor:
    """Return the mean of the ranks' losses."""
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def plain_loader(recipe: Recipe) -> DataLoader[tuple[Tensor, Tensor]]:
    """Return the batches of this rank: its share of each global batch, in the order of the samples."""
    sampler: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(
        recipe.samples, recipe.ranks, recipe.rank, shuffle=False
    )
    return DataLoader(recipe.samples, batch_size=recipe.batch, sampler=sampler)
