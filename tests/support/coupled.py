"""Modules and losses whose samples depend on each other, and such as only look like it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.own import Plain


def cross_entropies(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output, targets, reduction="none")


def in_batch_negatives(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output @ output.T, torch.arange(len(output)), reduction="none")


def weighted_by_the_batch(output: Tensor, targets: Tensor) -> Tensor:
    """By a number that no gradient goes through."""
    weights = (1.0 + targets) ** 2
    return cross_entropies(output, targets) * weights / weights.mean()


def divided_by_rows(output: Tensor, targets: Tensor) -> Tensor:
    return cross_entropies(output, targets) / len(output)


def tied_to_the_next_but_one(output: Tensor, targets: Tensor) -> Tensor:
    """Tie each row to the next but one: of two rows alone neither depends on the other."""
    return cross_entropies(output, targets) + (output * output.roll(2, 0)).sum(-1)


def repelled_by_its_copies(output: Tensor, targets: Tensor) -> Tensor:
    """Tie a sample to those alone that are nearly equal to it."""
    distances = (output[:, None] - output).norm(dim=-1)
    return cross_entropies(output, targets) + (distances < 1e-6).sum(-1)


def with_an_average(output: Tensor, targets: Tensor) -> Tensor:
    """It is added to each loss: their sum is the same however they are cut."""
    return cross_entropies(output, targets) + output.square().mean()


class Standardising(Plain):
    """Centres the batch by hand."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class Centred(nn.Module):
    """Centres the batch by hand, as a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def centred_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), Centred(), nn.Linear(8, 8), nn.Linear(8, 4))


def plain_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Linear(8, 4))


class Stateful(Plain):
    """Counts its forwards in every way there is, and computes with what it counted."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0
        self.seen: list[int] = []
        self.latest: Tensor | None = None
        self.total = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.calls += 1
            self.seen.append(len(x))
            self.latest = x
            self.total += 1
        shift = self.count.item() + self.calls + len(self.seen) + self.total.item()
        return super().forward(x) * (1 + shift / 100)


class Drawing(nn.Module):
    """Adds noise of torch's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Plain()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inner(x + torch.randn_like(x) if self.training else x)
        return logits


class OfTwelve(Plain):
    """Takes twelve rows and no other number."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(12, 8))
