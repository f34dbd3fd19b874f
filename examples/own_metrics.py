"""Images and validation metrics of one's own. Run it: python examples/own_metrics.py"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import wanma


class Bars(Dataset[tuple[Tensor, int]]):
    """Images of 8 × 8 with a bright row, whose number is the class."""

    def __len__(self) -> int:
        return 2_000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(index))
        image[0, index % 8] += 0.5
        return image, index % 8


def near(output: Tensor, targets: Tensor) -> Tensor:
    """One value per sample: its mean over all samples is the metric."""
    return (output.argmax(1) - targets).abs() <= 1


def recall_of_zero(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Values and a mask: the mean over those that count."""
    return output.argmax(1) == 0, targets == 0


def total_confidence(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """A sum and a count: the sums over all batches and ranks are divided at the end."""
    return output.softmax(1).amax(1).sum(), len(targets)


def main() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    job = {
        "train": {"steps": 60, "global_batch": 32, "learning_rate": 5e-3, "validate_every_steps": 20},
        "data": {"validation_fraction": 0.1},
        "observe": {"name": "own-metrics", "console": "plain"},
        "checkpoint": {"resume": False},
    }
    metrics = {"near": near, "recall of 0": recall_of_zero, "confidence": total_confidence}
    result = wanma.train(job, model=model, data=Bars(), metrics=metrics)
    last = result.report.validations[-1]
    print(f"accuracy {last['accuracy']:.2f}, near {last['metrics']['near']:.2f}")


if __name__ == "__main__":
    main()
