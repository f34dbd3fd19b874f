"""Application of a plan to a plain module: one function, in one fixed order."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from wanma.collectives.timing.communication_timer import CommunicationTimer
from wanma.collectives.timing.functional_wait_time import FunctionalWaitTime, get_functional_wait_time
from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan
from wanma.models.keyed_random.dropout import find_unkeyed_random_modules, replace_dropout
from wanma.models.keyed_random.forward_draws import RandomDraws
from wanma.models.layers.batch_norm import (
    StepStatistics,
    find_instance_norm_statistics,
    find_sample_coupling_modules,
    find_step_statistics_modules,
)
from wanma.models.model_spec import ModelSpec, seeded_generators
from wanma.models.structure.parallel_spec import ParallelSpec
from wanma.models.structure.parameter_roles import ParameterRole, find_parameter_roles
from wanma.models.structure.repeated_blocks import find_repeated_blocks
from wanma.models.user_modules.overlapping_parameters import reject_overlapping_parameters
from wanma.parallel.data_parallel.replicated import Replicated
from wanma.parallel.embedding.sharded_embedding import ShardedEmbedding, shard_embeddings
from wanma.parallel.gradients.gradient_compression import GradientCompression, build_compression
from wanma.parallel.gradients.gradient_hooks import GradientHooks
from wanma.parallel.memory.disk_pool import DiskPool
from wanma.parallel.memory.offload import (
    apply_activation_offload,
    apply_parameter_offload,
    parameter_storage_device,
)
from wanma.parallel.memory.recompute import apply_recompute
from wanma.parallel.mesh.parallel_mesh import ParallelMesh
from wanma.parallel.parameters.freezing import RequiresGradSync, freeze_permanently
from wanma.parallel.parameters.frozen_weights import cast_frozen_weights
from wanma.parallel.parameters.initialization import (
    WithoutValues,
    initialize_parameters,
    materialize_parameters,
)
from wanma.parallel.parameters.stale_parameters import StaleParameterCheck
from wanma.parallel.pipeline.stage_partition import extract_stage, pipeline_parallel_spec
from wanma.parallel.pipeline.tied_weights import TiedWeights, find_tied_weights, tied_names_between_ends
from wanma.parallel.precision.autocast import PRECISION_DTYPES, apply_autocast
from wanma.parallel.precision.float8 import apply_float8
from wanma.parallel.profiling.compute_timer import ComputeTimer

if TYPE_CHECKING:
    from wanma.parallel.data_parallel.sharded import Sharded
    from wanma.parallel.pipeline.pipeline_runner import PipelineRunner


@dataclass(frozen=True)
class ParallelModel:
    """One rank's part of a model under a plan, ready to train."""

    model_parts: tuple[nn.Module, ...]
    """Pipeline stages that this rank holds, in the model's order; the one module without a pipeline.

    Their parameters have the names of the full model, and no name comes twice.
    """
    pipeline: PipelineRunner | None
    data_parallel: tuple[Sharded | Replicated, ...]
    """Data parallelism of each model part."""
    tied_weights: TiedWeights
    """Tied weights that two stages hold."""
    parameter_names: tuple[str, ...]
    """Names of the full model's parameters, whatever part of it this rank holds."""
    trainable_names: tuple[str, ...]
    """Names of the parameters that are trained, or may be later: not frozen for good."""
    roles: Mapping[str, ParameterRole]
    """Roles of the full model's parameters, by name."""
    statistics_modules: Mapping[str, StepStatistics]
    """Modules of the full model that note statistics of a step; those of other stages without memory."""
    gradient_hooks: GradientHooks
    """Users' hooks on parameters."""
    compute_timer: ComputeTimer
    """Timer of this rank's compute, without its waits for other ranks."""
    random_draws: RandomDraws
    """Random draws of the model's forward and of its loss."""
    initialization_seed: int | None
    """Seed of the initial values that are still to be drawn; None where the constructor has drawn them."""
    disk_pool: DiskPool | None = None
    """Disk pool of this rank; None where the plan offloads nothing to disk."""
    compression: GradientCompression | None = None
    """Compressed exchanges of gradients; None where the plan compresses none."""
    embeddings: tuple[ShardedEmbedding, ...] = ()
    """Embedding tables that the data ranks share; none where tables are parameters like any other."""

    def initialize_parameters(self, exclude: Container[str] = ()) -> None:
        """Give the parameters their initial values, where no checkpoint does.

        Args:
            exclude: names of parameters that are filled otherwise.
        """
        release = self.disk_pool.release_pages if self.disk_pool is not None else lambda: None
        if self.initialization_seed is not None:
            for part in self.model_parts:
                initialize_parameters(part, self.initialization_seed, exclude, release)
        self.tied_weights.broadcast_values(dict(self.named_parameters()))
        release()

    @property
    def module(self) -> nn.Module:
        """Module of the complete model, where no pipeline has cut it."""
        (part,) = self.model_parts
        return part

    @property
    def gradient_divisor(self) -> int:
        """Number by which communication divides summed gradients; the loss is multiplied by it beforehand."""
        return self.data_parallel[0].gradient_divisor

    @property
    def communication_timer(self) -> CommunicationTimer:
        """Timer of this rank's communication."""
        return self.data_parallel[0].communication_timer

    def begin_micro_batch(self, is_last: bool) -> None:
        """Begin a micro-batch, before each forward that a backward follows, where no pipeline drives them."""
        for part in self.data_parallel:
            part.begin_micro_batch(is_last)

    def finalize_gradients(self) -> None:
        """Complete the gradients after the last backward of a step, where no pipeline drives them."""
        for part in self.data_parallel:
            part.finalize_gradients()
        for embedding in self.embeddings:
            embedding.finalize_gradients(self.gradient_divisor)

    def wait_until_weights_unused(self) -> None:
        """Wait until no rank computes with the weights, after an evaluation; all ranks call it."""
        for part in self.data_parallel:
            part.wait_until_weights_unused()

    def synchronize_gathers(self) -> None:
        """Wait for the ranks that gather from each other, before other communication. All ranks call it."""
        for part in self.data_parallel:
            part.synchronize_gathers()

    def reshard(self) -> None:
        """Make the state the parameters again, after a forward without backward."""
        for part in self.data_parallel:
            part.reshard()

    def reset_step_count(self) -> None:
        """Reset the step count, after forwards that belonged to no step."""
        for part in self.data_parallel:
            part.reset_step_count()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for part in self.model_parts:
            yield from part.named_parameters()

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        for part in self.model_parts:
            yield from part.named_buffers()

    def forward_parameters(self) -> Iterator[Tensor]:
        """Yield the tensors that are or were the model's parameters in forward passes."""
        yield from (parameter for part in self.model_parts for parameter in part.parameters())
        for strategy in self.data_parallel:
            yield from strategy.forward_parameters()

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters that are trained, or may be later, by name; tied copies included."""
        copies, names = self.tied_weights.saved_names, set(self.trainable_names)
        return {
            name: parameter for name, parameter in self.named_parameters() if copies.get(name, name) in names
        }

    def modules(self) -> Iterator[nn.Module]:
        for part in self.model_parts:
            yield from part.modules()


def parallelize(
    spec: ModelSpec, plan: Plan, parallel_mesh: ParallelMesh, seed: int, disk_pool: DiskPool | None = None
) -> ParallelModel:
    """Build the model of `spec` and apply `plan` to it.

    wanma's own models are built on the meta device and each rank allocates only its part, whose values
    `initialize_parameters` or a checkpoint then gives. A user's module is built in full on the CPU by its
    own constructor, seeded alike on every rank.

    Args:
        spec: constructor of the model and what it declares.
        plan: plan of the run.
        parallel_mesh: device meshes of the plan.
        seed: seed of the job.
        disk_pool: disk pool of this rank, for plans that offload to disk.

    Raises:
        JobError: the plan asks for a split that this model does not declare.
    """
    module = _build_module(spec, plan, seed)
    frozen = freeze_permanently(module, spec.is_frozen)
    _require_trainable(module, spec, plan)
    names = tuple(name for name, _ in module.named_parameters())
    trainable = tuple(name for name in names if name not in frozen)
    roles = find_parameter_roles(module)
    statistics_modules = find_step_statistics_modules(module)
    hooks = GradientHooks(module, plan)
    numbers = plan.stages_of_pipeline_rank(parallel_mesh.coordinate("pp"))
    parts = [module]
    if plan.pp > 1:
        parallel_spec = pipeline_parallel_spec(module, spec.parallel_spec, plan)
        parts = [extract_stage(module, parallel_spec, plan, number) for number in numbers]
    compression = build_compression(parallel_mesh, seed)
    embeddings = shard_embeddings(module, parallel_mesh, disk_pool) if plan.embedding != "dense" else []
    data_parallel = tuple(
        _parallelize_part(
            part, spec, plan, parallel_mesh, parallel_mesh.communication_timer, disk_pool, compression, frozen
        )
        for part in parts
    )
    for embedding in embeddings:  # after all that splits or moves parameters
        embedding.allocate(parallel_mesh.device)
    ties = find_tied_weights(
        parts,
        tied_names_between_ends(spec.parallel_spec) if spec.parallel_spec is not None else (),
        plan,
        parallel_mesh,
    )
    timer, waits = parallel_mesh.communication_timer, _time_functional_collectives(plan, parallel_mesh)
    clock = ComputeTimer(timer.clock, lambda: timer.position + waits.seconds, per_micro_batch=plan.pp > 1)
    draws = _build_random_draws(spec, module, plan, seed)
    pipeline = None
    if plan.pp > 1:
        from wanma.parallel.pipeline.pipeline_runner import PipelineRunner

        pipeline = PipelineRunner(
            parts, numbers, plan, parallel_mesh, data_parallel, clock, draws, StaleParameterCheck(module)
        )
    return ParallelModel(
        tuple(parts),
        pipeline,
        data_parallel,
        ties,
        names,
        trainable,
        roles,
        statistics_modules,
        hooks,
        clock,
        draws,
        None if spec.has_own_initialization else seed,
        disk_pool,
        compression,
        tuple(embeddings),
    )


def _build_module(spec: ModelSpec, plan: Plan, seed: int) -> nn.Module:
    if spec.has_own_initialization:
        with seeded_generators(seed):
            module = spec.build_module()
    else:
        with torch.device("meta"), WithoutValues():
            module = spec.build_module()
    if not module.training:  # as `from_pretrained` leaves it. Parts alone in evaluation mode stay there.
        module.train()
    if plan.precision == "fp64":
        module.double()  # and not `to`, which drops the imaginary part of complex buffers
    replace_dropout(module)
    module.zero_grad()  # an earlier gradient is not the run's
    return module


def _make_contiguous(module: nn.Module) -> None:
    """Make parameters contiguous that have another memory order, such as `channels_last`; values stay.

    Summed gradients are contiguous. Fused optimizers go through both as if they were laid out alike, and
    FSDP2 takes no other.
    """
    for parameter in module.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def _setting_against_keyed_draws(plan: Plan) -> str | None:
    """Return the setting of a plan that keeps a forward's own draws from being keyed by sample, if any."""
    sizes = {"tp": plan.tp, "cp": plan.cp, "ep": plan.ep, "pp": plan.pp}
    if plan.compile:
        return "parallel.compile = true"
    return next((f"parallel.{axis} = {size}" for axis, size in sizes.items() if size > 1), None)


def _build_random_draws(spec: ModelSpec, model: nn.Module, plan: Plan, seed: int) -> RandomDraws:
    # Models of wanma's own draw by keyed modules alone.
    uses_keyed_modules = not spec.has_own_initialization and all(
        type(module).__module__.startswith(("wanma.", "torch.nn.")) for module in model.modules()
    )
    return RandomDraws(
        seed,
        per_sample_obstacle=_setting_against_keyed_draws(plan),
        per_step_obstacle=f"parallel.pp = {plan.pp}" if plan.pp > 1 else None,
        sees_operators=not plan.compile and not uses_keyed_modules,
    )


def _time_functional_collectives(plan: Plan, parallel_mesh: ParallelMesh) -> FunctionalWaitTime:
    """Time the waits of the process for other tensor, context and expert ranks, and tell their kinds."""
    if max(plan.tp, plan.cp, plan.ep) == 1:
        return FunctionalWaitTime()
    timer = parallel_mesh.communication_timer
    if plan.tp == 1:
        timer.functional_kind = "context" if plan.cp > 1 else "data"
    if plan.ep > 1:
        timer.expert_group = parallel_mesh.dim_mesh("ep").get_group().group_name
    if timer.clock is not None:
        get_functional_wait_time("cuda")
        return FunctionalWaitTime()  # the timer of a GPU gets the waits of all threads
    return get_functional_wait_time()


def _parallelize_part(
    part: nn.Module,
    spec: ModelSpec,
    plan: Plan,
    parallel_mesh: ParallelMesh,
    communication_timer: CommunicationTimer,
    disk_pool: DiskPool | None,
    compression: GradientCompression | None,
    permanently_frozen: frozenset[str],
) -> Sharded | Replicated:
    """Apply the plan to one stage, in the order in which its splits can see through each other."""
    if plan.fp8:
        apply_float8(_blocks(part, spec.parallel_spec), plan)
    if not spec.has_own_initialization:  # users' weights would come back rounded
        cast_frozen_weights(part, PRECISION_DTYPES[plan.precision], permanently_frozen)
    if plan.ep > 1 or (spec.parallel_spec is not None and spec.parallel_spec.expert_modules is not None):
        from wanma.parallel.expert.expert_parallel import apply_expert_parallel

        apply_expert_parallel(part, spec.require_parallel_spec("parallel.ep"), parallel_mesh)
    if plan.tp > 1:
        from wanma.parallel.tensor.tensor_parallel import apply_tensor_parallel

        apply_tensor_parallel(part, spec.require_parallel_spec("parallel.tp"), parallel_mesh)
    if plan.cp > 1:
        from wanma.parallel.context.context_parallel import apply_context_parallel

        apply_context_parallel(part, spec.require_parallel_spec("parallel.cp"), parallel_mesh)
    blocks = _blocks(part, spec.parallel_spec)
    apply_recompute(blocks, plan)  # before compile, so that compile sees it
    if plan.compile:
        # The compiler's guards do not see all that a run sets: code of an earlier run in this process, with
        # another dropout or layout, would be used again and give other numbers.
        torch.compiler.reset()
        for block in blocks or [part]:
            block.compile()
    apply_activation_offload(blocks, plan, disk_pool)
    # Last: it owns every parameter's storage. The losses of wanma's own models choose their precision.
    data_parallel = _apply_data_parallel(
        part, blocks, spec, plan, parallel_mesh, communication_timer, compression, permanently_frozen
    )
    if not spec.has_own_initialization:
        materialize_parameters(
            part, parameter_storage_device(plan, parallel_mesh.device), parallel_mesh.device
        )
    elif plan.offload_parameters == "none":  # else FSDP2 has put everything where it belongs
        part.to(parallel_mesh.device)
    apply_parameter_offload(part, blocks, plan, disk_pool)
    if not isinstance(data_parallel, Replicated):
        from wanma.parallel.data_parallel.gather_order_check import install_gather_order_check
        from wanma.parallel.data_parallel.shared_memory_weights import share_weights_in_memory

        data_parallel = replace(
            data_parallel, shared_memory_weights=share_weights_in_memory(part, plan, communication_timer)
        )
        data_parallel.keep_unsharded_if_shared()
        data_parallel.unit_reducer.gather_order_check = install_gather_order_check(
            part, plan, stays_unsharded=not data_parallel.unit_reducer.reshards
        )
    if spec.has_own_initialization and plan.precision in ("bf16", "fp16"):
        apply_autocast(part, PRECISION_DTYPES[plan.precision], parallel_mesh.device)
    return data_parallel


def _apply_data_parallel(
    part: nn.Module,
    blocks: list[nn.Module],
    spec: ModelSpec,
    plan: Plan,
    parallel_mesh: ParallelMesh,
    communication_timer: CommunicationTimer,
    compression: GradientCompression | None,
    permanently_frozen: frozenset[str],
) -> Sharded | Replicated:
    if plan.computes_on_master_weights:
        return Replicated(
            part,
            parallel_mesh,
            communication_timer,
            torch.float64 if plan.precision == "fp64" else None,
            compression=compression,
            permanently_frozen=permanently_frozen,
        )
    from wanma.parallel.data_parallel.sharded import apply_sharding

    sharded = apply_sharding(
        part,
        blocks,
        _expert_modules(part, spec.parallel_spec),
        plan,
        parallel_mesh,
        communication_timer,
        full_precision_output=spec.input_kind == "custom",
        compression=compression,
        permanently_frozen=permanently_frozen,
    )
    if spec.has_own_initialization:
        return replace(sharded, requires_grad_sync=RequiresGradSync(part, permanently_frozen))
    return sharded


def _require_trainable(module: nn.Module, spec: ModelSpec, plan: Plan) -> None:
    """Refuse a module that the plan cannot train, and make its parameters contiguous."""
    reject_overlapping_parameters(module)
    _require_fp32_weights(module, spec)
    _require_dense_gradients(module, spec)
    _require_layout_independence(module, spec, plan)
    _make_contiguous(module)


def _require_fp32_weights(module: nn.Module, spec: ModelSpec) -> None:
    """Refuse trained weights of low precision: they are kept in fp32, so that small updates are not lost.

    `train.precision` says in which precision they compute.
    """
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise JobError(
                f"{spec.name}: {name} is {dtype}, but trained weights must be fp32",
                "build the model in fp32 (model.float()); train.precision sets the precision of computation",
            )


def _require_dense_gradients(module: nn.Module, spec: ModelSpec) -> None:
    for name, table in module.named_modules():
        if isinstance(table, (nn.Embedding, nn.EmbeddingBag)) and table.sparse and table.weight.requires_grad:
            raise JobError(
                f"{spec.name}: {name or type(table).__name__} makes sparse gradients, but only dense "
                "gradients are supported",
                "build it with sparse=False",
            )


def _require_layout_independence(module: nn.Module, spec: ModelSpec, plan: Plan) -> None:
    """Refuse modules that cannot give the same numbers on several ranks."""
    if (random_modules := find_unkeyed_random_modules(module)) and (
        splits := _setting_against_keyed_draws(plan)
    ):
        raise JobError(
            f"{spec.name}: {random_modules[0]} draws random numbers, but random numbers keyed by sample are "
            f"not supported under {splits}",
            "use nn.Dropout modules, or only data-parallel dimensions (dp_replicate, dp_shard) "
            "without parallel.compile",
        )
    if plan.data_parallel_size == 1:
        return
    if coupling_modules := find_sample_coupling_modules(module):
        raise JobError(
            f"{spec.name}: {coupling_modules[0]} computes statistics over all samples of a micro-batch, so "
            f"{plan.data_parallel_size} data ranks would train another model than one",
            "call super().forward or a torch batch normalization in its forward: wanma computes their "
            "statistics over model.batch_norm_group samples",
        )
    if statistics_modules := find_instance_norm_statistics(module):
        raise JobError(
            f"{spec.name}: the running statistics of {statistics_modules[0]} cover only the samples of one "
            "rank, so "
            f"{plan.data_parallel_size} data ranks would evaluate another model than one",
            "build it with track_running_stats=False",
        )


def _blocks(module: nn.Module, parallel_spec: ParallelSpec | None) -> list[nn.Module]:
    """Return the repeated blocks of this stage: declared, or found by structure."""
    if parallel_spec is None:
        return find_repeated_blocks(module)
    if parallel_spec.blocks is None:
        return []
    blocks = module.get_submodule(parallel_spec.blocks).children()
    return [block for block in blocks if any(True for _ in block.parameters())]


def _expert_modules(module: nn.Module, parallel_spec: ParallelSpec | None) -> list[nn.Module]:
    pattern = parallel_spec.expert_modules if parallel_spec is not None else None
    return [m for name, m in module.named_modules() if pattern is not None and fnmatchcase(name, pattern)]
