"""Data parallelism and ZeRO 0-3 as one mechanism: FSDP2 over the (replicate, shard) mesh.

Parameters, gradients and optimizer state are DTensors under the module's own names at every stage and every
size, one process included, so that there is one state format. The stages differ only in what is kept between
micro-batches (Rajbhandari et al. 2020):

    nothing     ZeRO 0   unsharded; gradients all-reduced once per step
    optimizer   ZeRO 1   unsharded parameters and gradients within a step, one reduce-scatter per step
    gradients   ZeRO 2   unsharded parameters within a step, gradients reduce-scattered per micro-batch
    parameters  ZeRO 3   parameters gathered around each block, forward and backward

In a pipeline torch's schedules reduce once, at the end of the step: gradients are unsharded until then, and
so are parameters from their first use on.

Context ranks hold the same parameters and other tokens: to the state they are data ranks like others, and
take part in its sharding. Experts are sharded over the ranks that hold the same ones.

Gradients are summed over the global batch. FSDP2 divides them by `Sharded.divisor`, by which the loss is
multiplied beforehand, so that the loop divides once, by the global batch's target count.

On a CPU, parameters that are neither sharded nor computed in another precision than they are kept in go
without FSDP2 (`replicated.py`). So do parameters that FSDP2 does not take, on every device: single numbers,
those without elements, and those of another dtype than most. They are replicated at every stage, in their own
precision. `parameters/frozen_weights.py` says how frozen weights are held.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor, Shard

from wanma.collectives.fsdp.point_to_point_collectives import (
    GlooAllGather,
    GlooReduceScatter,
    UnshardedReduce,
)
from wanma.collectives.fsdp.shared_memory_collectives import SharedAllGather, SharedReduceScatter
from wanma.collectives.shared_memory.backend import shared_group
from wanma.collectives.timing.communication_timer import Stopwatch
from wanma.job.plan.plan import Plan
from wanma.models.structure.repeated_blocks import shared_parameters
from wanma.parallel.data_parallel.reduction_order import UnitOrder
from wanma.parallel.data_parallel.replicated import Whole, kept_whole
from wanma.parallel.data_parallel.shared_memory_weights import CommonWeights, is_common
from wanma.parallel.gradients.gradient_compression import GradientCompression
from wanma.parallel.gradients.sharded_compression import compress_unit, names_of
from wanma.parallel.memory.offload import offload_policy
from wanma.parallel.memory.recompute import hide_hooks
from wanma.parallel.mesh.parallel_mesh import Grid
from wanma.parallel.parameters.freezing import Flags
from wanma.parallel.parameters.frozen_weights import FrozenWeights, held_once
from wanma.parallel.parameters.fsdp_units import group_of, units
from wanma.parallel.parameters.stale_parameters import Strays

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def shard_data(
    model: nn.Module,
    blocks: list[nn.Module],
    experts: list[nn.Module],
    plan: Plan,
    grid: Grid,
    stopwatch: Stopwatch,
    *,
    full_precision_output: bool,
    compression: GradientCompression | None = None,
    fixed: Collection[str] = (),
) -> Sharded | Whole:
    """Shard `model` over the data ranks: each block is one unit of communication, the rest another.

    Args:
        experts: modules whose parameters have experts as dim 0. Where `ep` splits them, they are units of
            their own, on their own mesh.
        full_precision_output: give the model's output as fp32, for losses that do not care themselves.
        compression: sums gradients in fewer bytes; None: they are summed as they are.
        fixed: names of parameters that are frozen for good.
    """
    if plan.computes_with_state:
        input_dtype = torch.float64 if plan.precision == "fp64" else None
        return Whole(model, grid, stopwatch, input_dtype, compression=compression, fixed=fixed)
    strays, scalars, frozen = Strays(model), None, None
    divides = _divides(plan)
    divisor = plan.replicas if divides else 1
    if alone := kept_whole(model):
        # Communication is timed on CPUs alone.
        watch = stopwatch if plan.device == "cpu" else Stopwatch()
        scalars = Whole(model, grid, watch, None, divisor=divisor, only=alone, fixed=fixed)
    if once := held_once(model, plan, grid, DTYPES[plan.precision], fixed):
        frozen = FrozenWeights(model, grid, once)
    whole = kept_whole(model) | (frozen.state if frozen is not None else set())
    policy, root_policy = _precision_policies(plan, full_precision_output=full_precision_output)
    reshard = plan.reshards
    offload = offload_policy(plan)
    if plan.device == "cpu" and plan.shard in ("none", "optimizer") and plan.offload_parameters == "none":
        # Gloo hides nothing behind compute: with one unit the ranks wait for each other once per step,
        # not once per block (about 5 % of a step of a 17M decoder on 2 ranks). These stages keep whole
        # gradients to the end of the step anyway; the price is a second copy while they are reduced.
        blocks = []
    # A parameter that two modules share stays one only in the unit that holds both of them.
    shared = shared_parameters(model, blocks) - {id(parameter) for parameter in whole}
    blocks = [block for block in blocks if shared.isdisjoint(id(p) for p in block.parameters())]
    of_experts = {id(parameter) for module in experts for parameter in module.parameters()}
    if plan.ep > 1:
        _shard_experts(experts, of_experts, plan, grid, policy, whole)
    placement = partial(_placement, experts=of_experts, shards=plan.shard_ranks) if of_experts else None
    for block in blocks:
        fully_shard(
            block,
            mesh=grid.state_mesh,
            mp_policy=policy,
            offload_policy=offload,
            ignored_params=whole,
            reshard_after_forward=reshard,
            shard_placement_fn=placement,
        )
    fully_shard(
        model,
        mesh=grid.state_mesh,
        mp_policy=root_policy,
        offload_policy=offload,
        ignored_params=whole,
        reshard_after_forward=False,
        shard_placement_fn=placement,
    )
    _prepare_units(model, experts, plan, grid, stopwatch, compression, divides=divides)
    assert isinstance(model, FSDPModule)
    return Sharded(
        model, plan, stopwatch, divisor, strays, scalars, frozen, UnitOrder(model, grid, stopwatch)
    )


def _precision_policies(
    plan: Plan, *, full_precision_output: bool
) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
    """Return FSDP2's policy for blocks, and the one for the model as a whole."""
    policy = MixedPrecisionPolicy()
    # A proof is in fp64 throughout: inputs that come as fp32, such as images, are cast.
    root_policy = MixedPrecisionPolicy(param_dtype=torch.float64) if plan.precision == "fp64" else policy
    if plan.precision in ("bf16", "fp16"):
        low = DTYPES[plan.precision]
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
        root_policy = replace(policy, output_dtype=torch.float32) if full_precision_output else policy
    return policy, root_policy


def _shard_experts(
    experts: list[nn.Module],
    of_experts: set[int],
    plan: Plan,
    grid: Grid,
    policy: MixedPrecisionPolicy,
    whole: set[nn.Parameter],
) -> None:
    """Make units of modules of experts, on the mesh that `ep` splits."""
    # Experts get their input from the block, in its precision.
    expert_policy = replace(policy, cast_forward_inputs=False)
    for module in experts:
        fully_shard(
            module,
            mesh=grid.expert_mesh,
            mp_policy=expert_policy,
            offload_policy=offload_policy(plan),
            ignored_params=whole,
            reshard_after_forward=plan.reshards,
            shard_placement_fn=partial(_placement, experts=of_experts, shards=grid.expert_mesh.size(1)),
        )
        if plan.recompute == "selective":
            hide_hooks(module)


def _prepare_units(
    model: nn.Module,
    experts: list[nn.Module],
    plan: Plan,
    grid: Grid,
    stopwatch: Stopwatch,
    compression: GradientCompression | None,
    *,
    divides: bool,
) -> None:
    """Set how every FSDP2 unit of `model` gathers and reduces."""
    names = names_of(model)
    spread = {id(module) for module in experts} if plan.ep > 1 else set()
    for unit in units(model):
        mesh = grid.expert_mesh if id(unit) in spread else grid.state_mesh
        unit.set_force_sum_reduction_for_comms(True)
        if plan.device == "cpu":
            _communicate_by_ourselves(unit, stopwatch, mesh, ahead=plan.overlap)
        if compression is not None:
            compress_unit(unit, compression, names)
        if not divides:
            unit.set_gradient_divide_factor(1.0)


@dataclass(frozen=True)
class Sharded:
    """Module, or one stage of it, whose parameters FSDP2 holds."""

    model: FSDPModule
    plan: Plan
    communication: Stopwatch
    """Time of the communication of gradients and parameters (CPU only).

    On a GPU communication overlaps with compute and is not separable by the host's clock.
    """
    divisor: int
    """Number by which communication divides the summed gradients; the loss is multiplied by it beforehand."""
    strays: Strays
    scalars: Whole | None
    """Parameters without dims: single numbers."""
    frozen: FrozenWeights | None
    """Parameters that are frozen for good and replicated on every rank."""
    order: UnitOrder
    """Order in which gradients are reduced."""
    weights: CommonWeights | None = None
    """Weights with which this rank computes, where all ranks of the node share their memory."""
    flags: Flags | None = None
    """Flags `requires_grad` of a model that may freeze and release parameters as it trains."""

    def begin_micro_batch(self, last: bool) -> None:
        """Begin a micro-batch: only the backward of the step's last one communicates everything.

        In a pipeline torch's schedules say so themselves; here it is done as they do, for a dry run, which
        has no schedule.
        """
        if self.weights is not None:
            self.weights.begin_micro_batch(last)
        at_end = self.plan.shard in ("none", "optimizer") or self.plan.pp > 1
        self.order.begin_micro_batch(reduces=last or not at_end)
        if at_end:
            self.model.set_requires_gradient_sync(last)
        else:
            self.model.set_requires_all_reduce(last)
        if self.plan.pp > 1:
            self.model.set_is_last_backward(last)
        if not self.order.reshards:
            self.model.set_reshard_after_backward(last)

    def stay_whole_if_shared(self) -> None:
        """Keep weights unsharded to the end of a step where all of them lie in memory that ranks share.

        It takes no memory, and modules may read each other's weights.
        """
        found = [group_of(unit) for unit in units(self.model)]
        if self.weights is not None and all(is_common(group) for group in found if group is not None):
            self.order.reshards = False
            self.model.set_reshard_after_forward(False)

    def end_backward(self) -> None:
        """Complete the gradients after the last backward of a step; most have been reduced within backward.

        Raises:
            WanmaError: as in `Whole.end_backward`.
        """
        self.strays.refuse()
        self.order.end_backward()
        if self.scalars is not None:
            self.scalars.end_backward()
        if self.frozen is not None:
            self.frozen.end_backward()
        if self.flags is not None:
            self.flags.settle()
        self.settle()

    def computing(self) -> Iterator[Tensor]:
        """Yield the tensors beside the module's parameters that are or were its parameters."""
        for group in filter(None, map(group_of, units(self.model))):
            for shard in group.fsdp_params:
                yield shard.sharded_param
                if hasattr(shard, "_unsharded_param"):
                    yield shard._unsharded_param
        yield from self.strays.given()
        if self.scalars is not None:
            yield from self.scalars.computing()
        if self.frozen is not None:
            yield from self.frozen.computing()

    def refuse_changes(self) -> None:
        """Check weights after a backward that has failed.

        Raises:
            JobError: a forward pass of the step has changed a weight.
        """
        self.order.refuse_changes()
        if self.scalars is not None:
            self.scalars.refuse_changes()
        if self.frozen is not None:
            self.frozen.refuse_changes()

    def meet(self) -> None:
        """Wait for the ranks that gather from each other, before any other communication.

        Raises:
            AgreedError: another rank is about to gather a part of the model.
        """
        self.order.meet()

    def settle(self) -> None:
        """Wait until no rank computes with weights that this one may change; all ranks call it.

        It precedes an update, and follows an evaluation of other weights in their place.
        """
        self.meet()
        if self.weights is not None:
            self.weights.settle()

    def begin_steps(self) -> None:
        """Begin counting steps anew, after forwards that belonged to no step."""
        if self.weights is not None:
            self.weights.begin_steps()

    def rest(self) -> None:
        """Reshard the parameters: a forward without backward leaves them unsharded."""
        for unit in units(self.model):
            unit.reshard()
        if self.scalars is not None:
            self.scalars.rest()
        if self.frozen is not None:
            self.frozen.rest()


def _divides(plan: Plan) -> bool:
    """Return whether communication divides gradients by the replicas.

    With one shard a divide factor of 1 costs two passes over the gradients (FSDP2 divides into a new tensor
    and copies), its default division by the replicas one in place, and none without replicas. Not in fp16: a
    loss multiplied by the replicas would overflow where one process's does not. And not where experts have
    fewer replicas than the rest.
    """
    return plan.shard_ranks == 1 and plan.ep == 1 and plan.precision != "fp16"


def _placement(parameter: nn.Parameter, experts: set[int], shards: int) -> Shard | None:
    """Return the dim along which a parameter is sharded: for experts dim 0 if it divides evenly.

    Then each shard has complete experts. Else it is another dim that divides and is not split yet, so that no
    shard has more than its share.

    Args:
        parameter: parameter of the model.
        experts: ids of the parameters that have experts as dim 0.
        shards: number of shards.

    Returns:
        None for FSDP2's own choice, which is dim 0 too.
    """
    if id(parameter) not in experts:
        return None
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    split = {placement.dim for placement in placements if isinstance(placement, Shard)}
    held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    whole = (dim for dim in range(1, parameter.ndim) if dim not in split)
    return Shard(next((dim for dim in (0, *whole) if held.shape[dim] % shards == 0), 0))


def _communicate_by_ourselves(
    unit: FSDPModule, stopwatch: Stopwatch, mesh: DeviceMesh, *, ahead: bool
) -> None:
    """Set this package's collectives over `mesh` (replicate, shard) in a unit, on CPUs."""
    gather: AllGather = GlooAllGather(stopwatch, ahead=ahead)
    scatter: ReduceScatter = GlooReduceScatter(stopwatch)
    if mesh.size(1) == 1:
        scatter = UnshardedReduce(stopwatch)
    elif (shared := shared_group(mesh.get_group(1))) is not None:
        gather, scatter = SharedAllGather(stopwatch, shared), SharedReduceScatter(stopwatch, shared)
    unit.set_custom_all_gather(gather)
    unit.set_custom_reduce_scatter(scatter)
    # The replicas' all-reduce is FSDP2's own call: it begins right after the allocation of the
    # output, which starts the stopwatch, and ends at this hook.
    unit.set_all_reduce_hook(lambda _: stopwatch.stop(time.perf_counter()))
