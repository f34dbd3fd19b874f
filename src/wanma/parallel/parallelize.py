"""Turn a plain module into this rank's part of it under a plan: one function, one fixed order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from wanma.job.errors import JobError
from wanma.job.plan import Plan
from wanma.models.build import ModelSpec
from wanma.models.dropout import replace_dropout, unkeyed_randomness
from wanma.models.layout import find_blocks
from wanma.models.statistics import couples_samples
from wanma.parallel.autocast import autocast_forward
from wanma.parallel.materialize import materialize
from wanma.parallel.mesh import Grid
from wanma.parallel.pipeline import Pipeline, keep_stage
from wanma.parallel.recompute import recompute
from wanma.parallel.shard import DTYPES, Sharded, shard_data
from wanma.parallel.tensor import split_tensors


@dataclass(frozen=True)
class Parallel:
    """This rank's part of a model, ready to train."""

    module: nn.Module
    pipeline: Pipeline | None
    sharded: Sharded
    parameter_names: tuple[str, ...]
    """Of the whole model, whatever part of it is here."""


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
    _refuse_what_depends_on_the_layout(module, spec, plan)
    names = tuple(name for name, _ in module.named_parameters())
    if plan.pp > 1:
        keep_stage(module, spec.require_layout("parallel.pp"), plan, grid.at("pp"))
    if plan.tp > 1:
        split_tensors(module, spec.require_layout("parallel.tp"), grid)
    blocks = _blocks(module, spec)
    recompute(blocks, plan)  # before compile, so that compile sees it
    if plan.compile:
        for block in blocks or [module]:
            block.compile()
    # Last: it owns every parameter's storage. The losses of wanma's own models choose their precision.
    sharded = shard_data(module, blocks, plan, grid, full_precision_output=spec.kind == "custom")
    if spec.own_initialization:
        module.to(grid.device)
        if plan.precision in ("bf16", "fp16"):
            autocast_forward(module, DTYPES[plan.precision], grid.device)
    else:
        materialize(module, grid.device, seed)
    pipeline = Pipeline(module, plan, grid) if plan.pp > 1 else None
    return Parallel(module, pipeline, sharded, names)


def _refuse_what_depends_on_the_layout(module: nn.Module, spec: ModelSpec, plan: Plan) -> None:
    """Law 1: what cannot give the same numbers on several ranks is not run on several ranks."""
    if plan.data_ranks == 1:
        return
    if coupled := couples_samples(module):
        raise JobError(
            f"{spec.name}: {coupled[0]} computes statistics over whatever samples share a micro-batch, so "
            f"{plan.data_ranks} data ranks would train another model than one",
            "make its groups explicit: wanma.models.statistics.convert_batch_norm(model, group)",
        )
    if drawing := unkeyed_randomness(module):
        raise JobError(
            f"{spec.name}: {drawing[0]} draws random numbers that depend on the rank, so "
            f"{plan.data_ranks} data ranks would train another model than one",
            "use nn.Dropout modules, which wanma keys by sample, or train on one rank",
        )


def _build(spec: ModelSpec, seed: int) -> nn.Module:
    if not spec.own_initialization:
        with torch.device("meta"):
            return spec.make()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return spec.make()


def _blocks(module: nn.Module, spec: ModelSpec) -> list[nn.Module]:
    path = spec.layout.blocks if spec.layout is not None else find_blocks(module)
    return [] if path is None else list(module.get_submodule(path).children())
