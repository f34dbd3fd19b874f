"""Cut a model into pipeline stages: each keeps its blocks, the ends what comes before and after them."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from wanma.job.errors import JobError
from wanma.job.plan import Plan
from wanma.models.layout import Layout


def keep_stage(model: nn.Module, layout: Layout, plan: Plan, stage: int) -> nn.Module:
    """Remove from `model`, in place, what pipeline stage `stage` of `plan.stages` does not hold.

    Parameter names stay those of the whole model, so that every stage writes the same checkpoint.

    Returns:
        `model`.

    Raises:
        JobError: there are fewer blocks than stages.
    """
    if layout.blocks is None:
        raise JobError(
            f"parallel.pp = {plan.pp}: {type(model).__name__} does not declare its blocks",
            "use pp = 1, or declare a layout with the path of the repeated blocks",
        )
    blocks = model.get_submodule(layout.blocks)
    assert isinstance(blocks, nn.ModuleDict)
    names = list(blocks)
    cuts = (0, *(plan.stage_cuts or even_cuts(len(names), plan.stages)), len(names))
    if len(cuts) != plan.stages + 1 or any(a >= b for a, b in pairwise(cuts)):
        raise JobError(
            f"parallel.pp = {plan.pp}: {len(names)} blocks cannot be cut into {plan.stages} stages",
            f"use at most {len(names)} stages (pp × virtual_stages)",
        )
    kept = set(names[cuts[stage] : cuts[stage + 1]])
    for name in names:
        if name not in kept:
            del blocks[name]
    absent = (layout.first if stage > 0 else ()) + (layout.last if stage < plan.stages - 1 else ())
    for path in absent:
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, None)
    return model


def even_cuts(blocks: int, stages: int) -> tuple[int, ...]:
    """First block of each stage but the first; the last stages get fewer, for they hold the head."""
    base, extra = divmod(blocks, stages)
    sizes = [base + (stage < extra) for stage in range(stages)]
    return tuple(sum(sizes[:stage]) for stage in range(1, stages))
