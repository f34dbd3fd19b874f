"""Callbacks, early stopping and gradient norms by layer. Run it: python examples/callbacks.py"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import wanma


class Spirals(Dataset[tuple[Tensor, int]]):
    """Points on two arms, told apart by class."""

    def __len__(self) -> int:
        return 1_000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        arm = index % 2
        angle = torch.tensor(1 + index / 300)
        return (1 - 2 * arm) * angle * torch.stack([angle.cos(), angle.sin()]), arm


class History(wanma.Callback):
    """Keeps curves. It runs in this program, so that they are here when the training is over."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.accuracies: list[float] = []

    def on_step(self, event: wanma.StepEnd) -> None:
        self.losses.append(event.loss)
        if event.layer_gradient_norms:
            print(f"  gradients of step {event.step}: {dict(event.layer_gradient_norms)}")

    def on_validation(self, event: wanma.ValidationEnd) -> None:
        self.accuracies.append(event.metrics["accuracy"])
        if event.metrics["accuracy"] == 1.0:
            raise wanma.StopTraining("nothing is left to learn")

    def on_checkpoint(self, event: wanma.CheckpointEnd) -> None:
        print(f"  {event.path.name}: wanma.load('{event.path.parent.parent}', step={event.step}) reads it")

    def on_end(self, event: wanma.RunEnd) -> None:
        print(f"  {event.outcome} at step {event.step}")


def main() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    job = {
        "train": {
            "steps": 400,
            "global_batch": 64,
            "learning_rate": 1e-3,
            "validate_every_steps": 20,
            "stop_patience": 5,  # end after 5 validations in a row without improvement
            "stop_metric": "accuracy",
            "stop_mode": "max",
            "stop_min_delta": 0.001,  # by more than this
        },
        "data": {"validation_fraction": 0.1},
        "checkpoint": {"resume": False},
        "observe": {"name": "callbacks", "console": "plain", "gradient_norms_every_steps": 20},
    }
    history = History()
    wanma.train(job, model=model, data=Spirals(), callbacks=[history])
    print(f"{len(history.losses)} losses, best accuracy {max(history.accuracies):.2f}")


if __name__ == "__main__":
    main()
