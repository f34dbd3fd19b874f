"""Two towers whose losses compare each sample with all others of the global batch, as CLIP's do."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wanma


class Pairs:
    """Two views of the same thing, and a weight of the sample."""

    def __init__(self, size: int = 48, features: int = 6, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.first = torch.randn(size, features, generator=generator)
        self.second = self.first @ torch.randn(features, features, generator=generator)
        self.weights = torch.rand(size, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.first[index], self.second[index], self.weights[index]


class Towers(nn.Module):
    """(rows, features) twice to (rows, 2, width), scaled by a temperature that is learned."""

    def __init__(self, features: int = 6, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(features, 8), nn.Tanh(), nn.Linear(8, width))
        self.second = nn.Linear(features, width)
        self.scale = nn.Parameter(torch.tensor([1.0]))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        a, b = F.normalize(self.first(first), dim=1), F.normalize(self.second(second), dim=1)
        return torch.stack((a * self.scale.exp(), b), 1)


class Standardised(Towers):
    """Gives its first tower the mean and deviation of the global batch."""

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        everyone = wanma.global_batch(first * self.scale)
        first = (first * self.scale - everyone.mean(0)) / (everyone.std(0) + 0.1)
        return super().forward(first, second)


def contrastive(output: Tensor, weights: Tensor) -> Tensor:
    """One loss per sample of this rank, against all of the global batch."""
    a, b = output.unbind(1)
    everyone_a, everyone_b = wanma.global_batch(output).unbind(1)
    own = wanma.global_rows(output)
    share = weights[:, 0] / wanma.global_batch(weights).mean()
    return share * (
        F.cross_entropy(a @ everyone_b.T, own, reduction="none")
        + F.cross_entropy(b @ everyone_a.T, own, reduction="none")
    )


def plain_contrastive(output: Tensor, weights: Tensor) -> Tensor:
    """The same in a loop that has the global batch at once."""
    a, b = output.unbind(1)
    logits, own = a @ b.T, torch.arange(len(a))
    share = weights[:, 0] / weights.mean()
    return share * (
        F.cross_entropy(logits, own, reduction="none") + F.cross_entropy(logits.T, own, reduction="none")
    )


class _Centred(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return x + torch.tanh(y - wanma.global_batch(y).mean(0))


class Deep(nn.Module):
    """Equal blocks that subtract the mean over the global batch."""

    def __init__(self, features: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Centred(features) for _ in range(3))
        self.towers = Towers(features)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        for block in self.blocks:
            first = block(first)
        output: Tensor = self.towers(first, second)
        return output


class WithPairs(Towers):
    """Also puts out the similarities within its micro-batch, which a loss may use or not."""

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        output = super().forward(first, second)
        a, b = output.unbind(1)
        return output, a @ b.T
