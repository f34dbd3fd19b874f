"""A script for torchrun: fully_shard (FSDP2), which is silent for some seconds before it trains."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 0)
    for _ in range(3):
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"rank {dist.get_rank()}: loss {loss.item():.4f}, {type(model[0].weight).__name__}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
