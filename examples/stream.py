"""Data that can only be iterated over. Run it: python examples/stream.py"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import wanma


class Measurements(IterableDataset[tuple[Tensor, Tensor]]):
    """Rows of a log, read from its beginning to its end; every rank reads all, and keeps its share."""

    def __init__(self, rows: int) -> None:
        self.rows, self.first, self.at = rows, 0, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for row in range(self.first, self.rows):
            x = torch.rand(3, generator=torch.Generator().manual_seed(row))
            self.at = row + 1
            yield x, (x[:1] + 2 * x[1:2] - x[2:])

    # Optional: a run that carries on need not read what came before.

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["at"]


def squared(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets) ** 2


def main() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    job = {
        "train": {"global_batch": 32, "learning_rate": 3e-2, "validation_samples": 100},
        "checkpoint": {"every_steps": 50},
        "observe": {"name": "stream", "console": "plain", "log_every_steps": 100},
    }
    data = Measurements(3_000), Measurements(100)  # training, validation
    # The first call stops in the second epoch; the second reads on from there.
    wanma.train(
        job, model=model, data=data, loss=squared, overrides=["train.steps=120", "checkpoint.resume=false"]
    )
    wanma.train(job, model=model, data=data, loss=squared, overrides=["train.steps=240"])
    with torch.no_grad():
        print(f"0.1 + 2 * 0.5 - 0.3 is {model(torch.tensor([[0.1, 0.5, 0.3]])).item():.2f}")


if __name__ == "__main__":
    main()
