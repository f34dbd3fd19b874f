"""DeepSpeed, ZeRO stage 1: optimizer state sharded; started by torchrun.

https://www.deepspeed.ai/getting-started/ ("Writing DeepSpeed Models", "Training") and
https://www.deepspeed.ai/tutorials/zero/. The optimizer is handed over: torch's fused AdamW, since DeepSpeed's
own kernel is compiled at first use.
"""

from __future__ import annotations

import deepspeed
from recipe import Recipe, cross_entropy, mean_of_ranks, plain_loader


def main() -> None:
    recipe = Recipe()
    deepspeed.init_distributed(dist_backend="nccl" if recipe.device.type == "cuda" else "gloo")
    config = {
        "train_micro_batch_size_per_gpu": recipe.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": recipe.train["gradient_clip"],
        "bf16": {"enabled": recipe.bf16},
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = deepspeed.initialize(
        model=recipe.model,
        model_parameters=recipe.model.parameters(),
        optimizer=recipe.optimizer(recipe.model.parameters()),
        config=config,
    )
    for inputs, targets in recipe.batches(plain_loader(recipe)):
        loss = cross_entropy(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        recipe.end_step(mean_of_ranks(loss))
    recipe.finish()


if __name__ == "__main__":
    main()
