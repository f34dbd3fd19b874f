"""wanma inside one's own loop: the forward pass and the loss are yours, the rest is the job's.

python examples/own_loop.py                        # one process
wanma launch examples/own_loop.py --ranks 2        # two
"""

import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import wanma


def main() -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    job = {
        "train": {"steps": 200, "global_batch": 64, "learning_rate": 5e-3, "seed": 1},
        "parallel": {"dp_replicate": ranks},
        "checkpoint": {"every_steps": 100},
        "observe": {"name": "own-loop", "log_every_steps": 50},
    }
    torch.manual_seed(1)  # every rank builds the same module and the same data
    x = torch.randn(4096, 16)
    data = TensorDataset(x, (x.sum(dim=1) > 0).long())
    with wanma.session(job) as session:
        model = session.prepare(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)))
        for batch in session.batches(data):
            logits = model(*batch.inputs)
            session.step(F.cross_entropy(logits, batch.targets, reduction="none"))


if __name__ == "__main__":
    main()
