"""Lightning Fabric and its DDP strategy, started by torchrun.

https://lightning.ai/docs/fabric/stable/fundamentals/convert.html, and gradient clipping of
https://lightning.ai/docs/fabric/stable/advanced/gradient_clipping.html.
"""

from __future__ import annotations

import os

from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from recipe import Recipe, cross_entropy
from torch.utils.data import DataLoader


def main() -> None:
    recipe = Recipe()
    fabric = Fabric(
        accelerator=recipe.device.type,
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),  # as torchrun has started them
        strategy=DDPStrategy(gradient_as_bucket_view=True),
        precision="bf16-mixed" if recipe.bf16 else "32-true",
    )
    fabric.launch()
    model, optimizer = fabric.setup(recipe.model, recipe.optimizer(recipe.model.parameters()))
    loader = fabric.setup_dataloaders(DataLoader(recipe.samples, batch_size=recipe.batch))
    for inputs, targets in recipe.batches(loader):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=recipe.train["gradient_clip"])
        optimizer.step()
        recipe.end_step(fabric.all_reduce(loss.detach(), reduce_op="mean"))
    recipe.finish()


if __name__ == "__main__":
    main()
