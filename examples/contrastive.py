"""A loss that compares every sample with all others of the global batch, as CLIP's: the same on any layout.

python examples/contrastive.py             # two ranks
python examples/contrastive.py 1           # one: the same numbers
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import wanma


class Towers(nn.Module):
    """Two networks that learn to give both views of a thing the same direction."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))
        self.second = nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 8))
        self.scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        a, b = F.normalize(self.first(first), dim=1), F.normalize(self.second(second), dim=1)
        return a * self.scale.exp(), b


def contrastive(output: tuple[Tensor, Tensor], _: Tensor) -> Tensor:
    """One loss per sample of this rank; its negatives are all other samples of the global batch."""
    a, b = output
    own = wanma.global_rows(a)
    to_b = F.cross_entropy(a @ wanma.global_batch(b).T, own, reduction="none")
    to_a = F.cross_entropy(b @ wanma.global_batch(a).T, own, reduction="none")
    return (to_a + to_b) / 2


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    torch.manual_seed(0)
    things = torch.randn(4096, 6)
    first, second = things @ torch.randn(6, 16), (things @ torch.randn(6, 24)).tanh()
    result = wanma.train(
        {
            "train": {"steps": 60, "global_batch": 64, "learning_rate": 5e-3, "seed": 1},
            "parallel": {"dp_replicate": ranks, "micro_batch": 64 // ranks},
            "observe": {"name": f"contrastive-{ranks}", "log_every_steps": 20},
        },
        model=Towers(),
        data=TensorDataset(first, second, torch.zeros(len(things))),  # no targets: the pairs teach
        loss=contrastive,
    )
    print(f"the report is in {result.run.report}")


if __name__ == "__main__":
    main()
