"""Workload of scripts in plain PyTorch: model, data, initial weights and rates of wanma's job file.

All of it happens before the measured steps, except for the loss and one reading of the clock per step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from wanma.data.opening import open_dataset
from wanma.job.file.loading import load_job
from wanma.models.model_spec import build_model, resolve_model_spec


def arguments() -> argparse.Namespace:
    """Return the arguments of such a script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--batch", type=int, required=True, help="samples per rank and step")
    return parser.parse_args()


class Workload:
    """Job as its parts, and the record of a training of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        job = load_job(options.job)
        self.train, self.parallel = job.train, job.parallel
        self.batch: int = options.batch
        self.bf16 = job.train.precision == "bf16"
        data = open_dataset(job.data, job.train)
        spec = resolve_model_spec(
            job.model,
            vocabulary_size=data.vocabulary_size,
            sequence_length=job.data.sequence_length,
            image_shape=None,
            classes=None,
        )
        self.model: nn.Module = build_model(spec, job.train.seed)
        self._numbers = range(job.train.steps * job.train.global_batch)
        rows = data.batch(self._numbers)
        self._inputs, self._targets = rows.inputs[0], rows.targets
        self._result: Path = options.result
        self._times: list[float] = []
        self._losses: list[Tensor] = []

    def adamw(self, parameters: Iterable[Tensor]) -> torch.optim.AdamW:
        """Return the job's AdamW with its fused kernel, as wanma has it."""
        train = self.train
        return torch.optim.AdamW(
            parameters,
            lr=train.learning_rate,
            betas=train.betas,
            eps=train.epsilon,
            weight_decay=train.weight_decay,
            fused=True,
        )

    def loader(self, rank: int, world_size: int) -> DataLoader[Any]:
        """Return this rank's batches: the rows that wanma's plan gives to the same rank."""
        mine = [n for n in self._numbers if n // self.batch % world_size == rank]
        return DataLoader(TensorDataset(self._inputs[mine], self._targets[mine]), batch_size=self.batch)

    def step_done(self, loss: Tensor) -> None:
        """Record the end of an optimizer step and this rank's loss in it."""
        self._losses.append(loss.detach())
        self._times.append(time.time())

    def finish(self, *, divisor: int | None = None, **facts: Any) -> NoReturn:
        """Average the losses over the ranks, write the record on rank 0, and end this process.

        It ends without destructors: torch's sometimes deadlock there, freeing the process group that DDP
        holds with Python's lock taken, while a thread of Gloo waits for that lock.

        Args:
            divisor: divisor of the sum over ranks; default: their number; 1: each noted its share.
        """
        losses = torch.stack(self._losses).double()
        dist.all_reduce(losses)
        losses /= divisor or dist.get_world_size()
        if dist.get_rank() == 0:
            record = {
                "times": self._times,
                "losses": losses.tolist(),
                "threads": torch.get_num_threads(),
                "fp32_matmul": torch.get_float32_matmul_precision(),
                **facts,
            }
            self._result.write_text(json.dumps(record))
        sys.stdout.flush()
        os._exit(0)
