"""Models, data and a loop for the injected faults; each fault strikes once the file `FAULT` exists."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import wanma

WIDTH, ROWS, ROW_BYTES = 256, 4096, 1 << 14
FAULT = Path("fault")
FILE = Path("rows.bin")


def strikes(rank: int | None = None) -> bool:
    """Return whether the fault is on, here if it is one rank's."""
    own = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    return FAULT.exists() and rank in (None, own)


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 4 * width)
        self.back = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.back(torch.relu(self.linear(x)))
        return x + y


class Breaking(Block):
    """Logarithm of a negative number once the fault is on."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + 0 * torch.log(-y.square().mean()) if self.training and strikes() else y


class Steep(Block):
    """Root of zero once the fault is on, whose derivative is infinite."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + torch.sqrt(0 * y.square().mean()) if self.training and strikes() else y


class Hanging(Block):
    """Rank 1 leaves its peers alone."""

    def forward(self, x: Tensor) -> Tensor:
        while strikes(1):
            time.sleep(1)
        return super().forward(x)


class Failing(Block):
    def forward(self, x: Tensor) -> Tensor:
        if strikes(1):
            raise RuntimeError("the table of rank 1 has no entry 4711")
        return super().forward(x)


def model(kind: str = "Block", blocks: int = 6, width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    middle = [Block(width) for _ in range(blocks)]
    middle[blocks // 2] = globals()[kind](width)
    return nn.Sequential(*middle, nn.Linear(width, 10))


class Rows:
    """Rows of random numbers, each with its class."""

    def __init__(self, width: int = WIDTH) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(ROWS, width, generator=generator)
        self.y = (self.x[:, 0] > 0).long()

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


class Narrow(Rows):
    def __init__(self) -> None:
        super().__init__(32)


class Wide(Rows):
    def __init__(self) -> None:
        super().__init__(512)


class Stored(Rows):
    """Rows beside which a piece of a file is read, past the page cache."""

    def __getitem__(self, index: int) -> Any:
        file = os.open(FILE, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # no more is read than asked for
        piece = os.pread(file, ROW_BYTES, index * ROW_BYTES % FILE.stat().st_size)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
        return self.x[index] + 0.0 * np.frombuffer(piece[:1], np.uint8)[0], self.y[index]


class Tokenized(Rows):
    """Rows beside which a text is taken apart, in Python."""

    def __getitem__(self, index: int) -> Any:
        words: dict[str, int] = {}
        for number in range(40_000):
            words.setdefault(str((index * number) % 1009), number)
        return self.x[index] + 0.0 * len(words), self.y[index]


class Stuck(Rows):
    def __getitem__(self, index: int) -> Any:
        while strikes(0):
            time.sleep(1)
        return super().__getitem__(index)


class Leaking(Rows):
    """Keeps a copy of what it has given."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def __getitem__(self, index: int) -> Any:
        if FAULT.exists():
            self.kept.append(torch.ones(2_000))
        return super().__getitem__(index)


class Damaged(Rows):
    """A sample that is not a number once the fault is on."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return (x * float("nan") if index == 64 and FAULT.exists() else x), y


def loop() -> None:
    """A loop of one's own that does something else between its steps."""
    ranks = int(os.environ["WORLD_SIZE"])
    job = {
        "train": {"steps": 100_000, "global_batch": 32},
        "parallel": {"dp_replicate": ranks},
        "observe": {"console": "quiet"},
    }
    with wanma.session(job) as session:
        trained = session.prepare(model())
        for batch in session.batches(Rows()):
            session.step(nn.functional.cross_entropy(trained(*batch.inputs), batch.targets, reduction="none"))
            time.sleep(0.05)


if __name__ == "__main__":
    loop()
