"""Shared parts of the peers' scripts: the task of wanma's job, and a record of every step.

Nothing of wanma is imported: a restarted rank would pay for it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.startup.model import TinyDecoder


def arguments(every: bool = False) -> argparse.Namespace:
    """Return the arguments that `run.py` passes to a peer's script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", type=Path, required=True, help="task.json, with tokens.npy beside it")
    parser.add_argument("--progress", type=Path, required=True, help="folder for the records of all ranks")
    if every:
        parser.add_argument("--checkpoint", type=Path, required=True, help="the newest checkpoint's file")
        parser.add_argument("--every", type=int, required=True, help="steps from checkpoint to checkpoint")
    return parser.parse_args()


class Task:
    """Model, optimizer and data of wanma's job.

    Args:
        path: path of task.json; tokens.npy beside it is (steps, ranks, samples, sequence + 1).
    """

    def __init__(self, path: Path) -> None:
        stated: dict[str, Any] = json.loads(path.read_text())
        self.steps: int = stated["steps"]
        self._model, self._rate = stated["model"], stated["learning_rate"]
        self._clip: float = stated["gradient_clip"]
        self._tokens = np.load(path.with_name("tokens.npy"), mmap_mode="r")

    def model(self) -> TinyDecoder:
        """Return the model with the initial weights that wanma gives it."""
        torch.manual_seed(1)
        return TinyDecoder(**self._model)

    def adamw(self, model: nn.Module) -> torch.optim.AdamW:
        # The fused kernel, as wanma's.
        return torch.optim.AdamW(
            model.parameters(), lr=self._rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    def clip(self, model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), self._clip)

    def loss(self, model: nn.Module, step: int, rank: int) -> Tensor:
        """Return the loss of this rank's samples of `step`, counted from 0."""
        rows = torch.from_numpy(self._tokens[step, rank].copy())  # (samples, sequence + 1)
        logits: Tensor = model(rows[:, :-1])
        return F.cross_entropy(logits.flatten(0, -2), rows[:, 1:].flatten())


class Progress:
    """Record of one rank: its process while it lives, and a line for each step, written in one call."""

    def __init__(self, folder: Path, rank: int, generation: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._generation = generation
        self._lines = os.open(folder / f"rank-{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        (folder / f"rank-{rank}.pid").write_text(str(os.getpid()))

    def step(self, step: int, loss: Tensor, **facts: Any) -> None:
        """Record the end of `step`, counted from 1."""
        record = {"generation": self._generation, "step": step, "loss": float(loss.detach()), **facts}
        os.write(self._lines, json.dumps({**record, "time": time.time()}).encode() + b"\n")


def leave(progress: Path, rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write rank 0's digest of its weights and their moments, and end this process.

    It ends without destructors: torch's sometimes deadlock, freeing a process group with Python's lock taken
    while a thread of Gloo waits for that lock.
    """
    if rank == 0:
        parameters = list(model.parameters())
        moments = [optimizer.state[p][key] for p in parameters for key in ("exp_avg", "exp_avg_sq")]
        (progress / "digest").write_text(digest([*parameters, *moments]))
    os._exit(0)


def digest(tensors: Iterable[Tensor]) -> str:
    """Return the SHA-256 of all bytes."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().contiguous().numpy().data)
    return total.hexdigest()
