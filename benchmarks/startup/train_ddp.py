"""Script of the peer: DistributedDataParallel under torchrun, two steps, clock read after the first.

As in https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html ("Initialize DDP with torchrun"). It
imports nothing of wanma; its tokens were prepared beforehand.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from benchmarks.startup.model import TinyDecoder


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=Path, required=True, help="(steps, ranks, sequence + 1) as .npy")
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DistributedDataParallel(TinyDecoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    ends, losses = [], []
    for rows in np.load(options.tokens, mmap_mode="r"):
        row = torch.from_numpy(rows[rank : rank + 1].copy())
        optimizer.zero_grad()
        loss = F.cross_entropy(model(row[:, :-1]).flatten(0, -2), row[:, 1:].flatten())
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ends.append(time.time())
        losses.append(loss.detach())
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    if rank == 0:
        record = {"first_step_ended": ends[0], "losses": (mean / dist.get_world_size()).tolist()}
        options.result.write_text(json.dumps(record))
    # Without destructors: now and then torch's deadlock, freeing the group that DDP holds with Python's
    # lock taken while a thread of Gloo waits for that lock.
    os._exit(0)


if __name__ == "__main__":
    main()
