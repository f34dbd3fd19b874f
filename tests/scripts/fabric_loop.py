"""A script for torchrun: a loop of Lightning Fabric."""

import os

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp")
    fabric.launch()
    torch.manual_seed(0)
    x = torch.randn(32, 8)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, (x.sum(dim=1) > 0).long()), batch_size=4))
    model = nn.Linear(8, 2)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for inputs, targets in loader:
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
    mean = fabric.all_reduce(loss.detach()).item()
    print(f"rank {fabric.global_rank} of {fabric.world_size}: {len(loader)} steps, loss {mean:.4f}")


if __name__ == "__main__":
    main()
