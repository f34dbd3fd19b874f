"""Partition of a model into pipeline stages: each keeps its blocks, the ends the modules around them."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan
from wanma.models.layers.batch_norm import GroupedBatchNorm
from wanma.models.structure.parallel_spec import ParallelSpec
from wanma.planner.pipeline.schedules import SPLIT_BACKWARD, balanced_cuts, invalid_cuts_reason
from wanma.torch_internals.modules import has_hooks, registered_children
from wanma.torch_internals.versions import SPLIT_BACKWARD_OF_REUSED_PARAMETERS, installed_torch_version


def pipeline_parallel_spec(model: nn.Module, parallel_spec: ParallelSpec | None, plan: Plan) -> ParallelSpec:
    """Return the layout by which a model is cut: its own, or that of a plain sequence of modules.

    Raises:
        JobError: the order of the model's parts is neither declared nor visible.
    """
    name, key = type(model).__name__, f"parallel.pp = {plan.pp}"
    if any(isinstance(module, GroupedBatchNorm) for module in model.modules()):
        raise JobError(
            f"{key}: {name} has batch normalization, which is not supported with a pipeline",
            "set parallel.pp = 1; data-parallel dimensions (dp_replicate, dp_shard) support any module",
        )
    if parallel_spec is not None and parallel_spec.blocks is not None:
        _require_no_hooks(model, parallel_spec.blocks, key)
        return parallel_spec
    if parallel_spec is None and type(model) is nn.Sequential:
        _require_no_hooks(model, "", key)
        _require_unshared_parameters(model, key)
        version, problem = installed_torch_version(), SPLIT_BACKWARD_OF_REUSED_PARAMETERS
        if plan.schedule in SPLIT_BACKWARD and problem.affects(version):
            raise JobError(
                f"parallel.schedule = '{plan.schedule}' with a custom module: {problem.describe(version)}",
                f"use parallel.schedule = 'interleaved_1f1b', or {problem.update_hint}",
            )
        return ParallelSpec(blocks="")
    raise JobError(
        f"{key}: {name} does not declare its blocks",
        "set parallel.pp = 1, or make the model an nn.Sequential, which is split between its children; "
        "data-parallel dimensions (dp_replicate, dp_shard) support any module",
    )


def extract_stage(model: nn.Module, parallel_spec: ParallelSpec, plan: Plan, stage: int) -> nn.Module:
    """Return a copy of `model` with the part that pipeline stage `stage` of `plan.stages` holds.

    Parameter names stay those of the full model, so that every stage writes the same checkpoint.

    Raises:
        JobError: the plan's cuts do not fit the model's blocks, or there are too few of them; or a kept
            module holds a parameter of another stage.
    """
    assert parallel_spec.blocks is not None
    model = copy.deepcopy(model)
    absent_tensors = _TensorReferences(model)
    blocks = model.get_submodule(parallel_spec.blocks)
    # Not named_children(), which leaves out the second name of a module that has two.
    names = [name for name, child in registered_children(blocks).items() if child is not None]
    cuts = plan.stage_cuts or _cuts_by_parameters(blocks, parallel_spec, plan)
    if reason := invalid_cuts_reason(
        cuts,
        len(names),
        plan.stage_count,
        bool(parallel_spec.first_stage_modules),
        bool(parallel_spec.last_stage_modules),
    ):
        cuts_text = f", stage cuts {list(plan.stage_cuts)}" if plan.stage_cuts else ""
        raise JobError(
            f"parallel.pp = {plan.pp} with {plan.virtual_stages} stages per rank{cuts_text}: {reason}",
            f"{type(model).__name__} has {len(names)} blocks; use fewer stages (pp × virtual_stages), or "
            "unset parallel.stage_cuts",
        )
    bounds = (0, *cuts, len(names))
    block_range = range(bounds[stage], bounds[stage + 1])
    if isinstance(model, Stageable):
        model.keep_stage(block_range, is_first=stage == 0, is_last=stage == plan.stage_count - 1)
        absent_tensors.check_stage(model, f"parallel.pp = {plan.pp}")
        return model
    for number, name in enumerate(names):
        if number not in block_range:
            delattr(blocks, name)  # `del` of a sequence would renumber the others
    absent_modules = (parallel_spec.first_stage_modules if stage > 0 else ()) + (
        parallel_spec.last_stage_modules if stage < plan.stage_count - 1 else ()
    )
    for path in absent_modules:
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, None)  # the model's forward tests the attribute for None
    absent_tensors.check_stage(model, f"parallel.pp = {plan.pp}")
    return model


@runtime_checkable
class Stageable(Protocol):
    """Model that removes by itself what other stages hold."""

    def keep_stage(self, held: range, *, is_first: bool, is_last: bool) -> None:
        """Keep the blocks in `held`, and the modules before or after all blocks where the stage is an end."""


class _TensorReferences:
    """Parameters and buffers of the full model, of which a stage is about to lose most."""

    def __init__(self, model: nn.Module) -> None:
        named_tensors = (*model.named_parameters(), *model.named_buffers())
        self._tensors = [(name, weakref.ref(tensor)) for name, tensor in named_tensors]

    def check_stage(self, stage: nn.Module, key: str) -> None:
        """Check a stage after the cut.

        Raises:
            JobError: another object than a module still refers to a tensor of another stage, which would
                not be trained.
        """
        stage_ids = {id(tensor) for tensor in (*stage.parameters(), *stage.buffers())}
        if self._dangling_names(stage_ids):
            gc.collect()  # removed modules may be in reference cycles
        if dangling := self._dangling_names(stage_ids):
            raise JobError(
                f"{key}: a part of the model holds a reference to {dangling[0]} of another stage, in a list "
                "or another object, and would compute with an untrained copy",
                "set parallel.pp = 1, or use in each part only its own parameters",
            )

    def _dangling_names(self, stage_ids: set[int]) -> list[str]:
        live_tensors = ((name, reference()) for name, reference in self._tensors)
        return [name for name, tensor in live_tensors if tensor is not None and id(tensor) not in stage_ids]


def _require_unshared_parameters(model: nn.Module, key: str) -> None:
    """Refuse children that share a parameter: a cut between them would train it as two."""
    first_names: dict[int, str] = {}
    named_tensors: list[tuple[str, torch.Tensor]] = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in named_tensors:
        first_name = first_names.setdefault(id(tensor), name)
        if first_name.partition(".")[0] != name.partition(".")[0]:
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            raise JobError(
                f"{key}: {first_name} and {name} are one {kind}, but different stages cannot share it",
                f"set parallel.pp = 1, or use a separate {kind} for each",
            )


def _require_no_hooks(model: nn.Module, blocks: str, key: str) -> None:
    """Refuse hooks on modules of which all stages have a part: each would run them, with its own inputs."""
    parts = blocks.split(".") if blocks else []
    for path in (".".join(parts[:depth]) for depth in range(len(parts) + 1)):
        module = model.get_submodule(path)
        if has_hooks(module):
            raise JobError(
                f"{key}: {path or type(model).__name__} has a hook, but every stage would run the "
                "hook on its part",
                "register it on a module that lies in one stage, such as the first or the last, or set "
                "parallel.pp = 1",
            )


def _cuts_by_parameters(blocks: nn.Module, parallel_spec: ParallelSpec, plan: Plan) -> tuple[int, ...]:
    """Return cuts balanced by parameters, for models of unknown FLOPs; empty for too few blocks."""
    block_list = [block for block in registered_children(blocks).values() if block is not None]
    sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in block_list]
    first, last = (
        0.0 if parallel_spec.first_stage_modules else None,
        0.0 if parallel_spec.last_stage_modules else None,
    )
    if plan.stage_count > len(sizes) + (first is not None) + (last is not None):
        return ()
    return balanced_cuts(sizes, plan.stage_count, first, last)
