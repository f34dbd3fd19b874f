"""Modules and losses of a user that parameter servers train, and such as they cannot."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wanma
from support.own import Plain, Shifted


class Composed(nn.Module):
    """A classifier with all that a module may have beside trained weights."""

    shift: Tensor

    def __init__(self, features: int = 8, classes: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(features, 16, bias=False)  # normalization would take a bias away again
        self.norm = nn.BatchNorm1d(16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.blocks[1].weight = self.blocks[0].weight
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.rare = nn.Parameter(torch.full((16,), 0.1))
        self.never = nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.linspace(-1, 1, 16))
        self.dropout = nn.Dropout(0.2)
        self.last = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(x)) + self.shift)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        hidden = self.dropout(hidden + self.frozen(hidden))
        if bool((is_large := x[:, :1] > 1.5).any()):
            hidden = hidden + self.rare * is_large
        logits: Tensor = self.last(hidden)
        return logits


def smoothed(output: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy with smoothed labels, and a penalty on large logits."""
    losses = F.cross_entropy(output, targets, reduction="none", label_smoothing=0.1)
    return losses + 0.01 * output.square().mean(-1)


def halved(step: int, steps: int) -> float:
    """A schedule."""
    return float(0.5 ** (step / steps))


def halved_in_8(step: int) -> float:
    """The same of 8 steps, whatever the number of steps is."""
    return halved(step, 8)


def in_batch(output: Tensor, targets: Tensor) -> Tensor:
    """Compares the samples of a micro-batch."""
    return F.cross_entropy(output @ output.T, torch.arange(len(output)), reduction="none") + 0 * targets


def in_global_batch(output: Tensor, targets: Tensor) -> Tensor:
    """Compares the samples of the global batch."""
    everyone, own = wanma.global_batch(output), wanma.global_rows(output)
    return F.cross_entropy(output @ everyone.T, own, reduction="none") + 0 * targets


class Averaging(Plain):
    """Follows its inputs in a buffer."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x - self.average)


class Unshifted(Shifted):
    """The same with another value of its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.shift.zero_()


class Marking(Plain):
    """Writes into a buffer, always the same."""

    mark: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mark", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.mark.fill_(1.0)
        return super().forward(x)


class Clamping(Plain):
    """Limits a weight in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Counting(Plain):
    """Computes with the number of its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(x) / (1 + 0.1 * self.passes)


class Hooked(Plain):
    """Has a hook on a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.last.weight.register_hook(torch.sign)


class Double(Plain):
    """Has a weight in fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale.float()


class Peeking(nn.Module):
    """Computes in training with the running statistics of its normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        mean: Any = self.norm.running_mean
        logits: Tensor = self.last(self.norm(x) + mean)
        return logits
