"""A script for the command `deepspeed`, or torchrun: the same training under ZeRO 1, 2 and 3."""

import argparse

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn

CONFIG = {
    "train_batch_size": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
}


def main() -> None:
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    parser.add_argument("--local_rank", type=int, default=-1)  # of the command `deepspeed`
    arguments = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    for stage in (1, 2, 3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        inputs = torch.randn(4, 16, 8)
        engine, *_ = deepspeed.initialize(
            args=arguments,
            model=model,
            model_parameters=model.parameters(),
            config={**CONFIG, "zero_optimization": {"stage": stage}},
        )
        rank, world = torch.distributed.get_rank(), engine.world_size
        share = slice(rank * 16 // world, (rank + 1) * 16 // world)
        losses = []
        for batch in inputs:
            loss = F.mse_loss(engine(batch[share]), batch[share].sum(dim=1, keepdim=True))
            engine.backward(loss)
            engine.step()
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean)
            losses.append(f"{mean.item() / world:.5f}")
        print(f"rank {rank} of {world}: ZeRO {engine.zero_optimization_stage()}, losses", *losses, flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
