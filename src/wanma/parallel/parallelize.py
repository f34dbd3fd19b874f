"""Turn a plain module into this rank's part of it under a plan: one function, one fixed order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from wanma.collectives.gloo import Stopwatch
from wanma.job.plan import Plan
from wanma.models.build import ModelSpec
from wanma.models.dropout import replace_dropout
from wanma.models.layout import find_blocks
from wanma.parallel.materialize import materialize
from wanma.parallel.mesh import Grid
from wanma.parallel.pipeline import Pipeline, keep_stage
from wanma.parallel.recompute import recompute
from wanma.parallel.shard import DTYPES, shard_data
from wanma.parallel.tensor import split_tensors


@dataclass(frozen=True)
class Parallel:
    """This rank's part of a model, ready to train."""

    module: nn.Module
    pipeline: Pipeline | None
    communication: Stopwatch


def parallelize(spec: ModelSpec, plan: Plan, grid: Grid, seed: int) -> Parallel:
    """Build the model of `spec` and apply `plan` to it.

    Models of ours are built on the meta device and each rank allocates only its part; a user's
    module is built whole on the CPU by its own constructor, seeded alike on every rank.

    Raises:
        JobError: the plan asks for a split that this model does not declare.
    """
    module = _build(spec, seed)
    if plan.precision == "fp64":
        module.to(torch.float64)
    replace_dropout(module)
    if plan.pp > 1:
        keep_stage(module, spec.require_layout("parallel.pp"), plan, grid.at("pp"))
    if plan.tp > 1:
        split_tensors(module, spec.require_layout("parallel.tp"), grid)
    blocks = _blocks(module, spec)
    recompute(blocks, plan)  # before compile, so that compile sees it
    if plan.compile:
        for block in blocks:
            block.compile()
    communication = shard_data(module, blocks, plan, grid)  # last: owns every parameter's storage
    if spec.own_initialization:
        module.to(grid.device)
    else:
        materialize(module, grid.device, seed)
    pipeline = Pipeline(module, plan, grid) if plan.pp > 1 else None
    return Parallel(module, pipeline, communication)


def _build(spec: ModelSpec, seed: int) -> nn.Module:
    if not spec.own_initialization:
        with torch.device("meta"):
            return spec.make()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return spec.make()


def _blocks(module: nn.Module, spec: ModelSpec) -> list[nn.Module]:
    path = spec.layout.blocks if spec.layout is not None else find_blocks(module)
    return list(module.get_submodule(path).children()) if path else []
