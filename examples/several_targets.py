"""Several targets per sample, as a dict. Run it: python examples/several_targets.py"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import wanma

Named = dict[str, Tensor]


class TwoHeads(nn.Module):
    """A class and a number of the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 64), nn.Tanh())
        self.side, self.radius = nn.Linear(64, 2), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Named:
        hidden = self.body(x)
        return {"side": self.side(hidden), "radius": self.radius(hidden).squeeze(1)}


class Points(Dataset[dict[str, Any]]):
    """Points of the plane, with what is to be told of each."""

    def __len__(self) -> int:
        return 4_000

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = torch.rand(2, generator=torch.Generator().manual_seed(index)) * 2 - 1
        return {"input": x, "target": {"side": int(x[0] > x[1]), "radius": x.norm()}}


def loss(output: Named, targets: Named) -> Tensor:
    """One per sample: the sum of two."""
    side = F.cross_entropy(output["side"], targets["side"], reduction="none")
    return side + (output["radius"] - targets["radius"]) ** 2


def accuracy(output: Named, targets: Named) -> Tensor:
    return output["side"].argmax(1) == targets["side"]


def radius_error(output: Named, targets: Named) -> Tensor:
    return (output["radius"] - targets["radius"]).abs()


def main() -> None:
    torch.manual_seed(1)
    job = {
        "train": {"steps": 200, "global_batch": 64, "learning_rate": 1e-2},
        "checkpoint": {"resume": False},
        "observe": {"name": "several-targets", "console": "plain", "log_every_steps": 100},
    }
    metrics = {"accuracy": accuracy, "radius error": radius_error}
    result = wanma.train(job, model=TwoHeads(), data=Points(), loss=loss, metrics=metrics)
    last = result.report.validations[-1]
    print(f"accuracy {last['accuracy']:.2f}, radius off by {last['metrics']['radius error']:.2f}")


if __name__ == "__main__":
    main()
