"""An optimizer and a schedule of one's own, on two ranks. Run it: python examples/own_optimizer.py"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import wanma


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023. It computes element by element, so that it updates any shard."""

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float] = (0.9, 0.99)
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]  # tensors in it are kept in checkpoints
                momentum = state.setdefault("momentum", torch.zeros_like(weight))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(group["lr"] * torch.lerp(weight.grad, momentum, first).sign())
                momentum.lerp_(weight.grad, 1 - second)


def schedule(step: int, steps: int) -> float:
    """Share of train.learning_rate: a warm-up, then one over the square root of the step, to zero."""
    return min((step + 1) / 20, math.sqrt(20 / (step + 1)), (steps - step) / 20)


class Products(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 4_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(2, generator=torch.Generator().manual_seed(index)) * 2 - 1
        return x, x.prod().unsqueeze(0)


def squared(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets) ** 2


def main() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
    job = {
        "train": {
            "steps": 300,
            "global_batch": 64,
            "learning_rate": 3e-3,
            "optimizer_arguments": {"betas": [0.9, 0.98]},
        },
        "parallel": {"dp_shard": 2, "shard": "optimizer"},
        "checkpoint": {"resume": False},
        "observe": {"name": "own-optimizer", "console": "plain", "log_every_steps": 100},
    }
    wanma.train(job, model=model, data=Products(), loss=squared, optimizer=Lion, schedule=schedule)
    with torch.no_grad():
        print(f"0.5 * -0.6 is {model(torch.tensor([[0.5, -0.6]])).item():.2f}")


if __name__ == "__main__":
    main()
