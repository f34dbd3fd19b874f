"""A whole job with one's own model, data and loss: plain PyTorch objects, two ranks.

    python examples/custom_model.py

The module knows nothing of wanma. Called again after a crash, it carries on.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import wanma


class Wave(nn.Module):
    """A small network that learns a curve."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """One loss per sample: wanma sums them and divides once by the global batch."""
    return (output - target).square().mean(dim=1)


def main() -> None:
    torch.manual_seed(0)
    x = torch.rand(4096, 1) * 6 - 3
    data = TensorDataset(x, torch.sin(2 * x))
    model = Wave()
    result = wanma.train(
        {
            "train": {"steps": 400, "global_batch": 64, "learning_rate": 5e-3, "seed": 1},
            "parallel": {"dp_replicate": 2},
            "checkpoint": {"every_steps": 100},
            "observe": {"name": "custom-model", "log_every_steps": 100},
        },
        model=model,
        data=data,
        loss=squared_error,
    )
    # The module now holds the trained weights.
    error = (model(torch.tensor([[1.0]])) - torch.sin(torch.tensor(2.0))).abs().item()
    print(f"sin(2) is off by {error:.3f}; the report is in {result.run.report}")


if __name__ == "__main__":
    main()
