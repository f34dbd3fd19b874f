"""Hugging Face Accelerate, started by torchrun.

https://huggingface.co/docs/accelerate/quicktour (prepare, backward), gradient clipping of
https://huggingface.co/docs/accelerate/basic_tutorials/migration, and the start of
https://huggingface.co/docs/accelerate/basic_tutorials/launch.
"""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from recipe import Recipe, cross_entropy
from torch.utils.data import DataLoader


def main() -> None:
    recipe = Recipe()
    accelerator = Accelerator(
        cpu=recipe.device.type == "cpu",
        mixed_precision="bf16" if recipe.bf16 else "no",
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    model, optimizer, loader = accelerator.prepare(
        recipe.model,
        recipe.optimizer(recipe.model.parameters()),
        DataLoader(recipe.samples, batch_size=recipe.batch),
    )
    for inputs, targets in recipe.batches(loader):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), recipe.train["gradient_clip"])
        optimizer.step()
        recipe.end_step(accelerator.reduce(loss.detach(), "mean"))
    recipe.finish()


if __name__ == "__main__":
    main()
