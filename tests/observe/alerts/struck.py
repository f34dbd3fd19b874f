"""Model and data on which a fault strikes while the file `fault` names it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wanma.training.balancing import rank_timing

FILE = Path(__file__).parent / "fault"
DEVICE = os.open(os.environ["DEVICE"], os.O_RDONLY) if "DEVICE" in os.environ else None
"""Device file of a GPU, which a process that uses one has open."""


def fault() -> str:
    """Return the name of the present fault; empty: there is none."""
    try:
        return FILE.read_text()
    except FileNotFoundError:
        return ""


class Allocator:
    """Allocator of a GPU, of which one allocation a step finds no room while the fault is there."""

    def __init__(self) -> None:
        self.retries = 0

    def state(self, _: str) -> rank_timing.AllocatorState:
        self.retries += fault() == "full GPU"
        return rank_timing.AllocatorState(0, self.retries)


rank_timing.allocator_state = Allocator().state


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.calls = 0
        self.register_buffer("ballast", torch.zeros(2**20))  # so that a checkpoint has 4 MiB

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.linear(x)
        time.sleep(0.1)  # long beside what other programs take of the processors
        is_second = dist.is_initialized() and dist.get_rank() == 1
        match fault():
            case "stall":
                time.sleep(600)
            case "nan" if time.time() % 2 < 0.2:  # not so often that the run ends
                return y * torch.nan
            case "spike":
                return y + torch.tensor([0.0, 0.0, 1000.0])  # a class that no sample has
            case "slow":
                time.sleep(0.2)
            case "slow rank" if is_second:
                time.sleep(0.2)
            case "death" if is_second and self.calls > 40:  # a start that fails at once is not repeated
                os._exit(9)
        return y


class Rows:
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if fault() == "slow data":
            time.sleep(0.5)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator), torch.tensor(index % 2)


def model() -> Net:
    torch.manual_seed(0)
    return Net()


def data() -> Rows:
    return Rows()
