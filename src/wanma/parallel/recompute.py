"""Trade memory for compute: keep only each block's input and run the block again in backward."""

from __future__ import annotations

from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint

from wanma.job.plan import Plan
from wanma.models.dropout import recompute_context


def recompute(blocks: list[nn.Module], plan: Plan) -> None:
    """Apply `plan.recompute` to each block in place; parameter names stay as they are."""
    if plan.recompute == "full":
        for block in blocks:
            checkpoint(block, use_reentrant=False, context_fn=recompute_context(block))
