"""wanma inside one's own loop: the forward pass and the loss are yours, the rest is the job's.

python examples/own_loop.py                        # one process
wanma launch --ranks 2 examples/own_loop.py        # two
torchrun --nproc-per-node 2 examples/own_loop.py   # two of torchrun's: nobody watches for hangs
"""

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import wanma


def main() -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    job = {
        "data": {"validation_fraction": 0.1},
        "train": {"steps": 200, "global_batch": 64, "learning_rate": 5e-3, "validate_every_steps": 50},
        "parallel": {"dp_replicate": ranks},
        "checkpoint": {"every_steps": 100},
        "observe": {"name": "own-loop", "log_every_steps": 50},
    }
    torch.manual_seed(1)  # every rank builds the same module and the same data
    x = torch.randn(4096, 16)
    data = TensorDataset(x, (x.sum(dim=1) > 0).long())
    with wanma.session(job) as session:
        model = session.prepare(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)))

        def losses(batch: wanma.Batch) -> Tensor:
            """One per sample: wanma sums them and divides once by the global batch."""
            logits = model(*batch.inputs)
            return F.cross_entropy(logits, batch.targets, reduction="none")

        for batch in session.batches(data, validate=losses):
            session.step(losses(batch))


if __name__ == "__main__":
    main()
