"""A model and data that go wrong on one rank at one step; imported by the ranks of the jobs under test."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Numbers:
    """64 samples; `broken` raises, or says what is wrong with sample 13: 'nan', 'ragged' or 'raises'."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.broken == "yes" or (self.broken == "raises" and index == 13):
            raise OSError(f"row {index} is unreadable")
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        if self.broken == "nan" and index == 13:
            x[2] = float("nan")
        if self.broken == "ragged" and index == 13:
            x = x[:3]
        return x, (x.sum() > 0).long()


class Net(nn.Module):
    """Does `what` in the forward pass of `step` on rank 1; every pass takes `seconds` longer."""

    def __init__(self, what: str = "", step: int = 3, seconds: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.what, self.step, self.seconds, self.passes = what, step, seconds, 0

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        output: Tensor = self.layers(x)
        trains = self.training and torch.is_grad_enabled()  # not in the checks before the first step
        self.passes += trains
        if not (trains and self.passes == self.step and dist.get_rank() == 1):
            return output
        match self.what:
            case "raise":
                raise ValueError("no such column: prize")
            case "exit":
                os._exit(7)
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "sleep":
                time.sleep(1000)
            case "eat":
                eaten = []
                while True:
                    eaten.append(torch.ones(1 << 24))
            case "nan":
                return output * float("nan")
            case "wait":
                while not Path("go-on").exists():
                    time.sleep(0.01)
        return output


def with_width(width: int) -> Net:
    """Fails inside torch for a width that is no number."""
    net = Net()
    net.layers[0] = nn.Linear(4, width)
    return net


def on_first_machine_only() -> Net:
    """As where the second machine lacks a file."""
    if dist.get_rank() == 1:
        raise FileNotFoundError("weights.pt")
    return Net()


model = Net
data = Numbers
