"""Training with DeepSpeed, ZeRO stage 1.

As in https://www.deepspeed.ai/getting-started/ ("Writing DeepSpeed Models", "Training") and
https://www.deepspeed.ai/tutorials/zero/: the optimizer comes from the configuration, which means DeepSpeed's
own fused Adam. Its kernel, and one that sums gradients in shared memory, are built on first use: that takes a
compiler and some minutes, once. Without a compiler `torch_adam` of https://www.deepspeed.ai/docs/config-json/
takes torch's instead. torch's fused AdamW is handed over as a client optimizer. Compiled by `engine.compile`.
DS_ACCELERATOR=cpu is set by run.py.
"""

from __future__ import annotations

import shutil
from typing import Any

import deepspeed  # type: ignore[import-not-found]  # only in the peers' environment
import torch.distributed as dist

from benchmarks.train.workload import Workload, arguments, cross_entropy


def main() -> None:
    work = Workload(arguments())
    deepspeed.init_distributed(dist_backend="gloo")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": work.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": work.train.gradient_clip,
        "bf16": {"enabled": work.bf16},
        "zero_optimization": {"stage": 1},
    }
    optimizer = None
    if work.fused:
        optimizer = work.adamw(work.model.parameters())
    else:
        parameters = {**work.adamw_arguments(), "torch_adam": shutil.which("g++") is None}
        config["optimizer"] = {"type": "AdamW", "params": parameters}
    engine, optimizer, _, _ = deepspeed.initialize(
        model=work.model, model_parameters=work.model.parameters(), optimizer=optimizer, config=config
    )
    if work.compile:
        engine.compile()
    for inputs, targets in work.loader(dist.get_rank(), dist.get_world_size()):
        loss = cross_entropy(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        work.step_done(loss)
    work.finish(optimizer=type(engine.optimizer.optimizer).__name__)


if __name__ == "__main__":
    main()
