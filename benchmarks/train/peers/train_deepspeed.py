"""DeepSpeed, ZeRO stage 1.

As in https://www.deepspeed.ai/getting-started/ ("Writing DeepSpeed Models", "Training") and
https://www.deepspeed.ai/tutorials/zero/. `torch_adam` of https://www.deepspeed.ai/docs/config-json/ takes
torch's AdamW, where DeepSpeed's own needs a compiler and minutes of building; the fused one is
handed over as a client optimizer. Compiled by `engine.compile`, https://www.deepspeed.ai/tutorials/.
DS_ACCELERATOR=cpu is set by run.py.
"""

from __future__ import annotations

from typing import Any

import deepspeed
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
        config["optimizer"] = {"type": "AdamW", "params": {**work.adamw_arguments(), "torch_adam": True}}
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
