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

Gradients are summed over the global batch. FSDP2 divides them by `Sharded.gradient_divisor`, by which the
loss is multiplied beforehand, so that the loop divides once, by the global batch's target count.

On a CPU, parameters that are neither sharded nor computed in another precision than they are kept in go
without FSDP2 (`replicated.py`). So do parameters that FSDP2 does not take, on every device: single numbers,
those without elements, and those of another dtype than most. They are replicated at every stage, in their own
precision. `parameters/frozen_weights.py` says how frozen weights are held.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from wanma.collectives.fsdp.point_to_point_collectives import (
    IdentityReduceScatter,
    PointToPointAllGather,
    PointToPointReduceScatter,
)
from wanma.collectives.fsdp.shared_memory_collectives import SharedMemoryAllGather, SharedMemoryReduceScatter
from wanma.collectives.shared_memory.backend import as_shared_memory_group
from wanma.collectives.timing.communication_timer import CommunicationTimer
from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan
from wanma.models.structure.repeated_blocks import find_shared_parameters
from wanma.parallel.data_parallel.reduction_order import UnitReducer
from wanma.parallel.data_parallel.replicated import Replicated, find_replicated_parameters
from wanma.parallel.data_parallel.shared_memory_weights import SharedMemoryWeights, is_in_shared_memory
from wanma.parallel.gradients.gradient_compression import GradientCompression
from wanma.parallel.gradients.sharded_compression import compress_fsdp_unit, parameter_names_by_id
from wanma.parallel.memory.recompute import exclude_hooks_from_recompute
from wanma.parallel.mesh.parallel_mesh import ParallelMesh
from wanma.parallel.parameters.freezing import RequiresGradSync
from wanma.parallel.parameters.frozen_weights import FrozenWeights, find_gather_free_weights
from wanma.parallel.parameters.fsdp_units import fsdp_units
from wanma.parallel.parameters.stale_parameters import StaleParameterCheck
from wanma.parallel.precision.autocast import PRECISION_DTYPES
from wanma.torch_internals.fsdp import AllGather, ReduceScatter, parameter_group, unsharded_or_none
from wanma.torch_internals.versions import SHARDED_INTEGER_PARAMETERS, installed_torch_version


def apply_sharding(
    model: nn.Module,
    blocks: list[nn.Module],
    experts: list[nn.Module],
    plan: Plan,
    parallel_mesh: ParallelMesh,
    communication_timer: CommunicationTimer,
    *,
    full_precision_output: bool,
    compression: GradientCompression | None = None,
    permanently_frozen: Collection[str] = (),
) -> Sharded:
    """Shard `model` over the data ranks: each block is one unit of communication, the rest another.

    Args:
        experts: modules whose parameters have experts as dim 0. Where `ep` splits them, they are units of
            their own, on their own mesh.
        full_precision_output: give the model's output as fp32, for losses that do not care themselves.
        compression: sums gradients in fewer bytes; None: they are summed as they are.
        permanently_frozen: names of parameters that are frozen for good.

    Raises:
        JobError: the installed torch cannot shard one of the parameters.
    """
    stale_check, frozen = StaleParameterCheck(model), None
    averages = _divides_by_replicas(plan)
    divisor = plan.replicate_group_size if averages else 1
    scalars = _replicate_unshardable(model, parallel_mesh, communication_timer, divisor, permanently_frozen)
    if gather_free := find_gather_free_weights(
        model, plan, parallel_mesh, PRECISION_DTYPES[plan.precision], permanently_frozen
    ):
        frozen = FrozenWeights(model, parallel_mesh, gather_free)
    unsharded = find_replicated_parameters(model) | (frozen.parameters if frozen is not None else set())
    _require_shardable(model, unsharded, plan)
    policy, root_policy = _precision_policies(plan, full_precision_output=full_precision_output)
    blocks = _communication_units(model, blocks, plan, unsharded)
    expert_ids = {id(parameter) for module in experts for parameter in module.parameters()}
    if plan.ep > 1:
        _shard_experts(experts, expert_ids, plan, parallel_mesh, policy, unsharded)
    placement = (
        partial(_shard_placement, expert_parameter_ids=expert_ids, shards=plan.shard_group_size)
        if expert_ids
        else None
    )
    shard = partial(
        fully_shard,
        mesh=parallel_mesh.hsdp_mesh,
        offload_policy=_offload_policy(plan),
        ignored_params=unsharded,
        shard_placement_fn=placement,
    )
    for block in blocks:
        shard(block, mp_policy=policy, reshard_after_forward=plan.reshards_after_forward)
    shard(model, mp_policy=root_policy, reshard_after_forward=False)
    _prepare_units(model, experts, plan, parallel_mesh, communication_timer, compression, averages=averages)
    assert isinstance(model, FSDPModule)
    return Sharded(
        model,
        plan,
        communication_timer,
        divisor,
        stale_check,
        scalars,
        frozen,
        UnitReducer(model, parallel_mesh, communication_timer),
    )


def _offload_policy(plan: Plan) -> OffloadPolicy:
    """Return FSDP2's offload policy: on GPUs, shards in host memory, be it mapped from a disk."""
    if plan.device == "cpu" or plan.offload_parameters == "none":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=plan.offload_parameters == "host")


def _require_shardable(model: nn.Module, unsharded: Collection[nn.Parameter], plan: Plan) -> None:
    version, problem = installed_torch_version(), SHARDED_INTEGER_PARAMETERS
    if not problem.affects(version):
        return
    exceptions = {id(parameter) for parameter in unsharded}
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() and id(parameter) not in exceptions:
            raise JobError(
                f"parallel.shard = '{plan.shard}': parameter {name} has dtype {parameter.dtype}, and "
                f"{problem.describe(version)}",
                f"make it a buffer (register_buffer), or {problem.update_hint}",
            )


def _communication_units(
    model: nn.Module, blocks: list[nn.Module], plan: Plan, ignored: set[nn.Parameter]
) -> list[nn.Module]:
    """Return the blocks that are units of communication of their own."""
    if plan.device == "cpu" and plan.shard in ("none", "optimizer") and plan.offload_parameters == "none":
        # Gloo hides nothing behind compute: with one unit the ranks wait for each other once per step,
        # not once per block (about 5 % of a step of a 17M decoder on 2 ranks). These stages keep whole
        # gradients to the end of the step anyway; the price is a second copy while they are reduced.
        return []
    # A parameter that two modules share stays one only in the unit that holds both of them.
    shared = find_shared_parameters(model, blocks) - {id(parameter) for parameter in ignored}
    return [block for block in blocks if shared.isdisjoint(id(p) for p in block.parameters())]


def _replicate_unshardable(
    model: nn.Module,
    parallel_mesh: ParallelMesh,
    communication_timer: CommunicationTimer,
    gradient_divisor: int,
    permanently_frozen: Collection[str],
) -> Replicated | None:
    """Replicate the parameters that cannot be sharded; None if the model has none."""
    selected = find_replicated_parameters(model)
    if not selected:
        return None
    return Replicated(
        model,
        parallel_mesh,
        communication_timer,
        None,
        gradient_divisor=gradient_divisor,
        selected=selected,
        permanently_frozen=permanently_frozen,
    )


def _precision_policies(
    plan: Plan, *, full_precision_output: bool
) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
    """Return FSDP2's policy for blocks, and the one for the model as a whole."""
    policy = MixedPrecisionPolicy()
    # A proof is in fp64 throughout: inputs that come as fp32, such as images, are cast.
    root_policy = MixedPrecisionPolicy(param_dtype=torch.float64) if plan.precision == "fp64" else policy
    if plan.precision in ("bf16", "fp16"):
        low = PRECISION_DTYPES[plan.precision]
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
        root_policy = replace(policy, output_dtype=torch.float32) if full_precision_output else policy
    return policy, root_policy


def _shard_experts(
    experts: list[nn.Module],
    expert_parameter_ids: set[int],
    plan: Plan,
    parallel_mesh: ParallelMesh,
    policy: MixedPrecisionPolicy,
    unsharded: set[nn.Parameter],
) -> None:
    """Make units of modules of experts, on the mesh that `ep` splits."""
    # Experts get their input from the block, in its precision.
    expert_policy = replace(policy, cast_forward_inputs=False)
    for module in experts:
        fully_shard(
            module,
            mesh=parallel_mesh.expert_hsdp_mesh,
            mp_policy=expert_policy,
            offload_policy=_offload_policy(plan),
            ignored_params=unsharded,
            reshard_after_forward=plan.reshards_after_forward,
            shard_placement_fn=partial(
                _shard_placement,
                expert_parameter_ids=expert_parameter_ids,
                shards=parallel_mesh.expert_hsdp_mesh.size(1),
            ),
        )
        if plan.recompute == "selective":
            exclude_hooks_from_recompute(module)


def _prepare_units(
    model: nn.Module,
    experts: list[nn.Module],
    plan: Plan,
    parallel_mesh: ParallelMesh,
    communication_timer: CommunicationTimer,
    compression: GradientCompression | None,
    *,
    averages: bool,
) -> None:
    """Set how every FSDP2 unit of `model` gathers and reduces."""
    names = parameter_names_by_id(model)
    expert_modules = {id(module) for module in experts} if plan.ep > 1 else set()
    for unit in fsdp_units(model):
        mesh = parallel_mesh.expert_hsdp_mesh if id(unit) in expert_modules else parallel_mesh.hsdp_mesh
        unit.set_force_sum_reduction_for_comms(True)
        if plan.device == "cpu":
            _set_cpu_collectives(unit, communication_timer, mesh, prefetch=plan.overlap)
        if communication_timer.clock is not None:
            _time_device_waits(unit, communication_timer)
        if compression is not None:
            compress_fsdp_unit(unit, compression, names)
        if not averages:
            unit.set_gradient_divide_factor(1.0)


@dataclass(frozen=True)
class Sharded:
    """Module, or one stage of it, whose parameters FSDP2 holds."""

    model: FSDPModule
    plan: Plan
    communication_timer: CommunicationTimer
    """Time of the communication of gradients and parameters."""
    gradient_divisor: int
    """Number by which communication divides the summed gradients; the loss is multiplied by it beforehand."""
    stale_parameter_check: StaleParameterCheck
    replicated: Replicated | None
    """Parameters without dims: single numbers."""
    frozen_weights: FrozenWeights | None
    """Parameters that are frozen for good and replicated on every rank."""
    unit_reducer: UnitReducer
    """Order in which gradients are reduced."""
    shared_memory_weights: SharedMemoryWeights | None = None
    """Weights with which this rank computes, where all ranks of the node share their memory."""
    requires_grad_sync: RequiresGradSync | None = None
    """Flags `requires_grad` of a model that may freeze and release parameters as it trains."""

    def begin_micro_batch(self, is_last: bool) -> None:
        """Begin a micro-batch: only the backward of the step's last one communicates everything.

        In a pipeline torch's schedules say so themselves; here it is done as they do, for a dry run, which
        has no schedule.
        """
        if self.shared_memory_weights is not None:
            self.shared_memory_weights.begin_micro_batch(is_last)
        reduces_at_end = self.plan.shard in ("none", "optimizer") or self.plan.pp > 1
        self.unit_reducer.begin_micro_batch(reduces=is_last or not reduces_at_end)
        if reduces_at_end:
            self.model.set_requires_gradient_sync(is_last)
        else:
            self.model.set_requires_all_reduce(is_last)
        if self.plan.pp > 1:
            self.model.set_is_last_backward(is_last)
        if not self.unit_reducer.reshards:
            self.model.set_reshard_after_backward(is_last)

    def keep_unsharded_if_shared(self) -> None:
        """Keep weights unsharded to the end of a step where all of them lie in memory that ranks share.

        It takes no memory, and modules may read each other's weights.
        """
        groups = [parameter_group(unit) for unit in fsdp_units(self.model)]
        if self.shared_memory_weights is not None and all(
            is_in_shared_memory(group) for group in groups if group is not None
        ):
            self.unit_reducer.reshards = False
            self.model.set_reshard_after_forward(False)

    def finalize_gradients(self) -> None:
        """Complete the gradients after the last backward of a step; most have been reduced within backward.

        Raises:
            WanmaError: as in `Replicated.finalize_gradients`.
        """
        self.stale_parameter_check.check()
        self.unit_reducer.finalize_gradients()
        if self.replicated is not None:
            self.replicated.finalize_gradients()
        if self.frozen_weights is not None:
            self.frozen_weights.end_step()
        if self.requires_grad_sync is not None:
            self.requires_grad_sync.adopt_late_changes()
        self.wait_until_weights_unused()

    def forward_parameters(self) -> Iterator[Tensor]:
        """Yield the tensors beside the module's parameters that are or were its parameters."""
        for group in filter(None, map(parameter_group, fsdp_units(self.model))):
            for shard in group.fsdp_params:
                yield shard.sharded_param
                if (unsharded := unsharded_or_none(shard)) is not None:
                    yield unsharded
        yield from self.stale_parameter_check.original_parameters()
        if self.replicated is not None:
            yield from self.replicated.forward_parameters()
        if self.frozen_weights is not None:
            yield from self.frozen_weights.forward_parameters()

    def check_weights_unchanged(self) -> None:
        """Check weights after a backward that has failed.

        Raises:
            JobError: a forward pass of the step has changed a weight.
        """
        self.unit_reducer.check_weights_unchanged()
        if self.replicated is not None:
            self.replicated.check_weights_unchanged()
        if self.frozen_weights is not None:
            self.frozen_weights.check_weights_unchanged()

    def synchronize_gathers(self) -> None:
        """Wait for the ranks that gather from each other, before any other communication.

        Raises:
            AllRanksError: another rank is about to gather a part of the model.
        """
        self.unit_reducer.synchronize_gathers()

    def wait_until_weights_unused(self) -> None:
        """Wait until no rank computes with weights that this one may change; all ranks call it.

        It precedes an update, and follows an evaluation of other weights in their place.
        """
        self.synchronize_gathers()
        if self.shared_memory_weights is not None:
            self.shared_memory_weights.wait_until_weights_unused()

    def reset_step_count(self) -> None:
        """Reset the step count, after forwards that belonged to no step."""
        if self.shared_memory_weights is not None:
            self.shared_memory_weights.reset_step_count()

    def reshard(self) -> None:
        """Reshard the parameters: a forward without backward leaves them unsharded."""
        for unit in fsdp_units(self.model):
            unit.reshard()
        if self.replicated is not None:
            self.replicated.reshard()
        if self.frozen_weights is not None:
            self.frozen_weights.reshard()


def _divides_by_replicas(plan: Plan) -> bool:
    """Return whether communication divides gradients by the replicas.

    With one shard a divide factor of 1 costs two passes over the gradients (FSDP2 divides into a new tensor
    and copies), its default division by the replicas one in place, and none without replicas. Not in fp16: a
    loss multiplied by the replicas would overflow where one process's does not. And not where experts have
    fewer replicas than the rest.
    """
    return plan.shard_group_size == 1 and plan.ep == 1 and plan.precision != "fp16"


def _shard_placement(parameter: nn.Parameter, expert_parameter_ids: set[int], shards: int) -> Shard | None:
    """Return the dim along which a parameter is sharded: for experts dim 0 if it divides evenly.

    Then each shard has complete experts. Else it is another dim that divides and is not split yet, so that no
    shard has more than its share.

    Args:
        parameter: parameter of the model.
        expert_parameter_ids: ids of the parameters that have experts as dim 0.
        shards: number of shards.

    Returns:
        None for FSDP2's own choice, which is dim 0 too.
    """
    if id(parameter) not in expert_parameter_ids:
        return None
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    split = {placement.dim for placement in placements if isinstance(placement, Shard)}
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    unsplit_dims = (dim for dim in range(1, parameter.ndim) if dim not in split)
    return Shard(next((dim for dim in (0, *unsplit_dims) if local.shape[dim] % shards == 0), 0))


def _set_cpu_collectives(
    unit: FSDPModule, communication_timer: CommunicationTimer, mesh: DeviceMesh, *, prefetch: bool
) -> None:
    """Set this package's collectives over `mesh` (replicate, shard) in a unit, on CPUs."""
    gather: AllGather = PointToPointAllGather(communication_timer, prefetch=prefetch)
    scatter: ReduceScatter = PointToPointReduceScatter(communication_timer)
    if mesh.size(1) == 1:
        scatter = IdentityReduceScatter(communication_timer)
    elif (shared := as_shared_memory_group(mesh.get_group(1))) is not None:
        gather, scatter = (
            SharedMemoryAllGather(communication_timer, shared),
            SharedMemoryReduceScatter(communication_timer, shared),
        )
    unit.set_custom_all_gather(gather)
    unit.set_custom_reduce_scatter(scatter)
    # The replicas' all-reduce is FSDP2's own call: it begins right after the allocation of the
    # output, which starts the stopwatch, and ends at this hook.
    unit.set_all_reduce_hook(lambda _: communication_timer.end_data_wait(time.perf_counter()))


def _time_device_waits(unit: FSDPModule, communication_timer: CommunicationTimer) -> None:
    """Time the waits of a GPU's stream for a unit's gathers and reductions, with the copies around them.

    FSDP2 communicates on streams of its own. In these calls, and there alone, the one that computes waits for
    them.
    """
    if (group := parameter_group(unit)) is None:
        return

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*arguments: Any) -> Any:
            with communication_timer.time_blocking_transfer("data"):
                return call(*arguments)

        return timed_call

    group.wait_for_unshard = timed(group.wait_for_unshard)
    group.post_backward = timed(group.post_backward)
    group.finalize_backward = timed(group.finalize_backward)
