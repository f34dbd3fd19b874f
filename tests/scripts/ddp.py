"""A script for torchrun: DistributedDataParallel, as its tutorial has it. It knows nothing of wanma."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    data = TensorDataset(x, (x.sum(dim=1) > 0).long())
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for inputs, targets in loader:
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.all_reduce(loss)
    print(f"rank {rank} ({local_rank} here) of {dist.get_world_size()}: loss {loss.item() / 2:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
