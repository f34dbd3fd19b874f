"""Script of the peer: DistributedDataParallel under torchrun, with checkpoints where a file is named.

As in https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html ("Initialize DDP with torchrun"). It
imports nothing of wanma. Rank 0 appends the time of each step's end and its mean loss to the record.
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
    parser.add_argument("--tokens", type=Path, required=True, help="(rows, ranks, sequence + 1) as .npy")
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, default=10, help="steps from checkpoint to checkpoint")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    module = TinyDecoder()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    first = 0
    if options.checkpoint is not None and options.checkpoint.exists():
        saved = torch.load(options.checkpoint)
        module.load_state_dict(saved["weights"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    model = DistributedDataParallel(module)
    tokens = np.load(options.tokens, mmap_mode="r")
    for step in range(first + 1, options.steps + 1):
        row = torch.from_numpy(tokens[(step - 1) % len(tokens)][rank : rank + 1].copy())
        optimizer.zero_grad()
        loss = F.cross_entropy(model(row[:, :-1]).flatten(0, -2), row[:, 1:].flatten())
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ended, mean = time.time(), loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if rank == 0:
            with options.record.open("a") as record:
                record.write(json.dumps({"step": step, "time": ended, "loss": mean.item()}) + "\n")
            if options.checkpoint is not None and step % options.every == 0:
                state = {
                    "step": step,
                    "weights": module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                }
                torch.save(state, options.checkpoint.with_suffix(".partial"))
                options.checkpoint.with_suffix(".partial").replace(options.checkpoint)
    dist.barrier()
    # Without destructors: now and then torch's deadlock, freeing the group that DDP holds with Python's
    # lock taken while a thread of Gloo waits for that lock.
    os._exit(0)


if __name__ == "__main__":
    main()
