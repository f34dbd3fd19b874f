"""Script of the peer: Ray Train's TorchTrainer on two workers of two nodes; it imports nothing of wanma."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any


def train_loop(config: dict[str, Any]) -> None:
    """Train the model of the startup benchmark; rank 0 records the end of the first step."""
    import numpy as np
    import ray.train
    import ray.train.torch
    import torch
    import torch.nn.functional as F
    from torch.nn.utils import clip_grad_norm_

    from benchmarks.startup.model import TinyDecoder

    torch.set_num_threads(1)
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(1)
    model = ray.train.torch.prepare_model(TinyDecoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for step, rows in enumerate(np.load(config["tokens"])):
        row = torch.from_numpy(rows[rank : rank + 1].copy())
        optimizer.zero_grad()
        loss = F.cross_entropy(model(row[:, :-1]).flatten(0, -2), row[:, 1:].flatten())
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ended, losses = time.time(), loss.detach() / 2
        torch.distributed.all_reduce(losses)
        if rank == 0 and step == 0:
            Path(config["record"]).write_text(json.dumps({"time": ended, "loss": losses.item()}))


def main() -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    parser = argparse.ArgumentParser()
    for name in ("--address", "--tokens", "--record", "--storage"):
        parser.add_argument(name, required=True)
    options = parser.parse_args()
    ray.init(address=options.address, log_to_driver=False)
    TorchTrainer(
        train_loop,
        train_loop_config={"tokens": options.tokens, "record": options.record},
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=options.storage, name="peer"),
    ).fit()


if __name__ == "__main__":
    main()
