"""Plain modules and datasets of a user, which know nothing of wanma."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wanma.data.batch import IGNORE_INDEX


class Numbers:
    """Rows of normal numbers with a class each; equal for equal seeds."""

    def __init__(self, size: int = 64, features: int = 8, classes: int = 4, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(size, features, generator=generator)
        self.targets = torch.randint(classes, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class PartlyLabelled(Numbers):
    """Sequences in which each position's target may be missing: from all of them to none in a row."""

    def __init__(self, size: int = 64, sequence: int = 6, vocabulary: int = 16) -> None:
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randint(vocabulary, (size, sequence), generator=generator)
        self.targets = torch.randint(vocabulary, (size, sequence), generator=generator)
        missing = torch.arange(size) % (sequence + 1)
        self.targets[torch.arange(sequence) < missing.unsqueeze(1)] = IGNORE_INDEX


class Tagger(nn.Module):
    """Tokens to a class at every position, with normalization, dropout and equal blocks."""

    def __init__(
        self, vocabulary: int = 16, hidden: int = 12, dropout: float = 0.0, tied: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.GELU(), nn.Dropout(dropout))
            for _ in range(2)
        )
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


class Normalized(nn.Module):
    """A classifier with torch's own batch normalization."""

    def __init__(self, features: int = 8, classes: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(features, 16, bias=False)  # normalization would take a bias away again
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(F.relu(self.norm(self.first(x))))
        return logits


class Plain(nn.Module):
    """A classifier without anything special."""

    def __init__(self, features: int = 8, classes: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(features, 16)
        self.last = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(F.relu(self.first(x)))
        return logits


class Noisy(Plain):
    """Draws from torch's own generator while training, by a module that wanma cannot key."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = nn.AlphaDropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.noise(x))


class Scaled(Plain):
    """Has a setting in an attribute alone."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class NumpyDrawn(Plain):
    """Draws its weights from numpy and Python."""

    def __init__(self) -> None:
        super().__init__()
        self.last.weight.data = torch.from_numpy(np.random.randn(4, 16)).float() + random.random()


def seeded(make: Any, seed: int = 3) -> Any:
    """Model that `make` constructs, alike in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


class Steep(Plain):
    """Finite losses with a gradient that is not: the root of zero."""

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return logits + (logits * 0.0).square().sqrt()


class Unlabelled(PartlyLabelled):
    """No position has a target."""

    def __init__(self) -> None:
        super().__init__()
        self.targets.fill_(IGNORE_INDEX)


def save_images(path: Any, size: int, count: int = 48, classes: int = 3) -> None:
    """An .npz of coloured noise with labels."""
    import numpy as np

    generator = np.random.default_rng(1)
    images = generator.integers(0, 256, (count, 3, size, size), dtype=np.uint8)
    labels = generator.integers(0, classes, count)
    np.savez(path, images=images, labels=labels)


class Poisoned(Numbers):
    """Some rows are not numbers."""

    def __init__(self, bad: range) -> None:
        super().__init__(size=48)
        self.inputs[list(bad)] = float("nan")


class TellsCompiled(Plain):
    """Doubles its logits when it runs compiled."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if torch.compiler.is_compiling() else 1.0)


class Shifted(Plain):
    """Adds a buffer, which stays fp32 whatever the parameters are computed in."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.linspace(-1, 1, 16))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(F.relu(self.first(x) + self.shift))
        return logits


def exact_job(folder: Path, collectives: str = "auto") -> dict[str, Any]:
    """Job of three deterministic steps in fp64, 7 samples each, for a model given as an object."""
    return {
        "model": {"factory": "any:thing"},
        "data": {"cache": str(folder / "cache")},
        "train": {
            "steps": 3,
            "global_batch": 7,
            "precision": "fp64",
            "learning_rate": 1e-2,
            "deterministic": True,
            "validation_samples": 2,
        },
        "parallel": {"collectives": collectives},
        "checkpoint": {"every_steps": 0},
    }
