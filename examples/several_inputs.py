"""A model of several inputs, given by place and by name. Run it: python examples/several_inputs.py"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import wanma


class Rent(nn.Module):
    """A table of districts, and numbers; the number of rooms may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.districts = nn.Embedding(4, 8)
        self.head = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, area: Tensor, district: Tensor, *, rooms: Tensor) -> Tensor:
        """(rows,) each, to (rows,)."""
        x = torch.cat([area[:, None], rooms[:, None], self.districts(district)], dim=1)
        result: Tensor = self.head(x).squeeze(1)
        return result


class Flats(Dataset[dict[str, Any]]):
    """Samples as dicts: `inputs` by place, `target`, and every other key by its name to forward."""

    def __len__(self) -> int:
        return 4_000

    def __getitem__(self, index: int) -> dict[str, Any]:
        area, rooms = torch.rand(2, generator=torch.Generator().manual_seed(index))
        district = index % 4
        rent = 0.5 + area + 0.2 * rooms + 0.1 * district
        return {"inputs": (area, district), "rooms": rooms, "target": rent}


def absolute(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).abs()


def main() -> None:
    torch.manual_seed(1)
    model = Rent()
    job = {
        "train": {"steps": 300, "global_batch": 64, "learning_rate": 1e-2},
        "checkpoint": {"resume": False},
        "observe": {"name": "several-inputs", "console": "plain", "log_every_steps": 100},
    }
    wanma.train(job, model=model, data=Flats(), loss=absolute, metrics={"error": absolute})
    with torch.no_grad():
        rent = model(torch.tensor([0.5]), torch.tensor([2]), rooms=torch.tensor([0.5])).item()
    print(f"0.5 + 0.5 + 0.2 * 0.5 + 0.1 * 2 is {rent:.2f}")


if __name__ == "__main__":
    main()
