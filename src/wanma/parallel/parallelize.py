"""Application of a plan to a plain module: one function, in one fixed order."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from wanma.collectives.timing.communication_timer import Stopwatch
from wanma.collectives.timing.functional_wait_time import Waits, waits
from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan
from wanma.models.keyed_random.dropout import replace_dropout, unkeyed_randomness
from wanma.models.keyed_random.forward_draws import RandomDraws
from wanma.models.layers.batch_norm import NotesStatistics, couples_samples, keeps_statistics, noting_modules
from wanma.models.model_spec import ModelSpec, seeded_generators
from wanma.models.structure.parallel_spec import Layout
from wanma.models.structure.parameter_roles import Role, parameter_roles
from wanma.models.structure.repeated_blocks import repeated_blocks
from wanma.models.user_modules.overlapping_parameters import refuse_shared_memory
from wanma.parallel.context.context_parallel import split_context
from wanma.parallel.data_parallel.gather_order_check import watch_gathers
from wanma.parallel.data_parallel.replicated import Whole
from wanma.parallel.data_parallel.sharded import DTYPES, Sharded, shard_data
from wanma.parallel.data_parallel.shared_memory_weights import share_weights
from wanma.parallel.expert.expert_parallel import split_experts
from wanma.parallel.gradients.gradient_compression import GradientCompression, open_compression
from wanma.parallel.gradients.gradient_hooks import GradientHooks
from wanma.parallel.memory.disk_pool import Scratch
from wanma.parallel.memory.offload import offload_activations, offload_parameters, parameters_device
from wanma.parallel.memory.recompute import recompute
from wanma.parallel.mesh.parallel_mesh import Grid
from wanma.parallel.parameters.freezing import Flags, frozen_for_good
from wanma.parallel.parameters.frozen_weights import round_frozen
from wanma.parallel.parameters.initialization import allocate, draw
from wanma.parallel.parameters.stale_parameters import Strays
from wanma.parallel.pipeline.pipeline_runner import Pipeline
from wanma.parallel.pipeline.stage_partition import keep_stage, stage_layout
from wanma.parallel.pipeline.tied_weights import Ties, between_ends, tie_stages
from wanma.parallel.precision.autocast import autocast_forward
from wanma.parallel.precision.float8 import compute_in_fp8
from wanma.parallel.profiling.compute_timer import WorkClock
from wanma.parallel.tensor.tensor_parallel import split_tensors


@dataclass(frozen=True)
class Parallel:
    """One rank's part of a model under a plan, ready to train."""

    parts: tuple[nn.Module, ...]
    """Pipeline stages that this rank holds, in the model's order; the one module without a pipeline.

    Their parameters have the names of the full model, and no name comes twice.
    """
    pipeline: Pipeline | None
    data_parallel: tuple[Sharded | Whole, ...]
    """Data parallelism of each model part."""
    ties: Ties
    """Tied weights that two stages hold."""
    parameter_names: tuple[str, ...]
    """Names of the full model's parameters, whatever part of it this rank holds."""
    trainable_names: tuple[str, ...]
    """Names of the parameters that are trained, or may be later: not frozen for good."""
    roles: Mapping[str, Role]
    """Roles of the full model's parameters, by name."""
    noting: Mapping[str, NotesStatistics]
    """Modules of the full model that note statistics of a step; those of other stages without memory."""
    hooks: GradientHooks
    """Users' hooks on parameters."""
    clock: WorkClock
    """Timer of this rank's compute, without its waits for other ranks."""
    draws: RandomDraws
    """Random draws of the model's forward and of its loss."""
    seed: int | None
    """Seed of the initial values that are still to be drawn; None where the constructor has drawn them."""
    scratch: Scratch | None = None
    """Disk pool of this rank; None where the plan offloads nothing to disk."""
    compression: GradientCompression | None = None
    """Compressed exchanges of gradients; None where the plan compresses none."""

    def initialize(self, but: Container[str] = ()) -> None:
        """Give the parameters their initial values, where no checkpoint does.

        Args:
            but: names of parameters that are filled otherwise.
        """
        if self.seed is not None:
            for part in self.parts:
                draw(part, self.seed, but)
        self.ties.copy_first(dict(self.named_parameters()))
        if self.scratch is not None:
            self.scratch.rest()

    @property
    def module(self) -> nn.Module:
        """Module of the complete model, where no pipeline has cut it."""
        (part,) = self.parts
        return part

    @property
    def divisor(self) -> int:
        """Number by which communication divides summed gradients; the loss is multiplied by it beforehand."""
        return self.data_parallel[0].divisor

    @property
    def communication(self) -> Stopwatch:
        """Timer of this rank's communication."""
        return self.data_parallel[0].communication

    def begin_micro_batch(self, last: bool) -> None:
        """Begin a micro-batch, before each forward that a backward follows, where no pipeline drives them."""
        for part in self.data_parallel:
            part.begin_micro_batch(last)

    def end_backward(self) -> None:
        """Complete the gradients after the last backward of a step, where no pipeline drives them."""
        for part in self.data_parallel:
            part.end_backward()

    def settle(self) -> None:
        """Wait until no rank computes with the weights, after an evaluation; all ranks call it."""
        for part in self.data_parallel:
            part.settle()

    def meet(self) -> None:
        """Wait for the ranks that gather from each other, before other communication. All ranks call it."""
        for part in self.data_parallel:
            part.meet()

    def rest(self) -> None:
        """Make the state the parameters again, after a forward without backward."""
        for part in self.data_parallel:
            part.rest()

    def begin_steps(self) -> None:
        """Begin counting steps anew, after forwards that belonged to no step."""
        for part in self.data_parallel:
            part.begin_steps()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for part in self.parts:
            yield from part.named_parameters()

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        for part in self.parts:
            yield from part.named_buffers()

    def computing(self) -> Iterator[Tensor]:
        """Yield the tensors that are or were the model's parameters in forward passes."""
        yield from (parameter for part in self.parts for parameter in part.parameters())
        for held in self.data_parallel:
            yield from held.computing()

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters that are trained, or may be later, by name; tied copies included."""
        copies, names = self.ties.names, set(self.trainable_names)
        return {name: one for name, one in self.named_parameters() if copies.get(name, name) in names}

    def modules(self) -> Iterator[nn.Module]:
        for part in self.parts:
            yield from part.modules()


def parallelize(
    spec: ModelSpec, plan: Plan, grid: Grid, seed: int, scratch: Scratch | None = None
) -> Parallel:
    """Build the model of `spec` and apply `plan` to it.

    wanma's own models are built on the meta device and each rank allocates only its part, whose values
    `initialize` or a checkpoint then gives. A user's module is built in full on the CPU by its own
    constructor, seeded alike on every rank.

    Args:
        spec: constructor of the model and what it declares.
        plan: plan of the run.
        grid: device meshes of the plan.
        seed: seed of the job.
        scratch: disk pool of this rank, for plans that offload to disk.

    Raises:
        JobError: the plan asks for a split that this model does not declare.
    """
    whole = _make(spec, plan, seed)
    refuse_shared_memory(whole)
    fixed = frozen_for_good(whole, spec.frozen)
    _refuse_low_weights(whole, spec)
    _refuse_sparse_gradients(whole, spec)
    _refuse_what_depends_on_the_layout(whole, spec, plan)
    _store_row_by_row(whole)
    names = tuple(name for name, _ in whole.named_parameters())
    trainable = tuple(name for name in names if name not in fixed)
    roles = parameter_roles(whole)
    noting = noting_modules(whole)
    hooks = GradientHooks(whole, plan)
    numbers = plan.stages_of(grid.at("pp"))
    parts = [whole]
    if plan.pp > 1:
        layout = stage_layout(whole, spec.layout, plan)
        parts = [keep_stage(whole, layout, plan, number) for number in numbers]
    compression = open_compression(grid, seed)
    data_parallel = tuple(
        _apply(part, spec, plan, grid, grid.communication, scratch, compression, fixed) for part in parts
    )
    ties = tie_stages(parts, between_ends(spec.layout) if spec.layout is not None else (), plan, grid)
    # Waits of the process for other tensor, context and expert ranks.
    within = waits() if max(plan.tp, plan.cp, plan.ep) > 1 else Waits()
    clock = WorkClock(
        grid.device.type, lambda: grid.communication.waited_seconds + within.seconds, by_piece=plan.pp > 1
    )
    draws = _random_draws(spec, whole, plan, seed)
    pipeline = None
    if plan.pp > 1:
        pipeline = Pipeline(parts, numbers, plan, grid, data_parallel, clock, draws, Strays(whole))
    to_draw = None if spec.own_initialization else seed
    return Parallel(
        tuple(parts),
        pipeline,
        data_parallel,
        ties,
        names,
        trainable,
        roles,
        noting,
        hooks,
        clock,
        draws,
        to_draw,
        scratch,
        compression,
    )


def _make(spec: ModelSpec, plan: Plan, seed: int) -> nn.Module:
    if spec.own_initialization:
        with seeded_generators(seed):
            module = spec.make()
    else:
        with torch.device("meta"):
            module = spec.make()
    if not module.training:  # as `from_pretrained` leaves it. Parts alone in evaluation mode stay there.
        module.train()
    if plan.precision == "fp64":
        module.double()  # and not `to`, which drops the imaginary part of complex buffers
    replace_dropout(module)
    module.zero_grad()  # an earlier gradient is not the run's
    return module


def _store_row_by_row(module: nn.Module) -> None:
    """Make parameters contiguous that have another memory order, such as `channels_last`; values stay.

    Summed gradients are contiguous. Fused optimizers go through both as if they were laid out alike, and
    FSDP2 takes no other.
    """
    for parameter in module.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def _splits(plan: Plan) -> str | None:
    """Return the setting of a plan that keeps a forward's own draws from being keyed by sample, if any."""
    sizes = {"tp": plan.tp, "cp": plan.cp, "ep": plan.ep, "pp": plan.pp}
    if plan.compile:
        return "parallel.compile = true"
    return next((f"parallel.{axis} = {size}" for axis, size in sizes.items() if size > 1), None)


def _random_draws(spec: ModelSpec, whole: nn.Module, plan: Plan, seed: int) -> RandomDraws:
    # Models of wanma's own draw by keyed modules alone.
    ours = not spec.own_initialization and all(
        type(module).__module__.startswith(("wanma.", "torch.nn.")) for module in whole.modules()
    )
    return RandomDraws(
        seed,
        unable=_splits(plan),
        unable_single=f"parallel.pp = {plan.pp}" if plan.pp > 1 else None,
        sees_operators=not plan.compile and not ours,
    )


def _apply(
    part: nn.Module,
    spec: ModelSpec,
    plan: Plan,
    grid: Grid,
    stopwatch: Stopwatch,
    scratch: Scratch | None,
    compression: GradientCompression | None,
    fixed: frozenset[str],
) -> Sharded | Whole:
    """Apply the plan to one stage, in the order in which its splits can see through each other."""
    if plan.fp8:
        compute_in_fp8(_blocks(part, spec.layout), plan)
    if not spec.own_initialization:  # users' weights would come back rounded
        round_frozen(part, DTYPES[plan.precision], fixed)
    if plan.ep > 1 or (spec.layout is not None and spec.layout.experts is not None):
        split_experts(part, spec.require_layout("parallel.ep"), grid)
    if plan.tp > 1:
        split_tensors(part, spec.require_layout("parallel.tp"), grid)
    if plan.cp > 1:
        split_context(part, spec.require_layout("parallel.cp"), grid)
    blocks = _blocks(part, spec.layout)
    recompute(blocks, plan)  # before compile, so that compile sees it
    if plan.compile:
        for block in blocks or [part]:
            block.compile()
    offload_activations(blocks, plan, scratch)
    # Last: it owns every parameter's storage. The losses of wanma's own models choose their precision.
    data_parallel = shard_data(
        part,
        blocks,
        _experts(part, spec.layout),
        plan,
        grid,
        stopwatch,
        full_precision_output=spec.kind == "custom",
        compression=compression,
        fixed=fixed,
    )
    if spec.own_initialization and isinstance(data_parallel, Sharded):
        data_parallel = replace(data_parallel, flags=Flags(part, fixed))
    if not spec.own_initialization:
        allocate(part, parameters_device(plan, grid.device), grid.device)
    elif plan.offload_parameters == "none":  # else FSDP2 has put everything where it belongs
        part.to(grid.device)
    offload_parameters(part, blocks, plan, scratch)
    if isinstance(data_parallel, Sharded):
        data_parallel = replace(data_parallel, weights=share_weights(part, plan, stopwatch))
        data_parallel.stay_whole_if_shared()
        data_parallel.order.watch = watch_gathers(part, plan, stays_whole=not data_parallel.order.reshards)
    if spec.own_initialization and plan.precision in ("bf16", "fp16"):
        autocast_forward(part, DTYPES[plan.precision], grid.device)
    return data_parallel


def _refuse_low_weights(module: nn.Module, spec: ModelSpec) -> None:
    """Refuse trained weights of low precision: they are kept in fp32, so that small updates are not lost.

    `train.precision` says in which precision they compute.
    """
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise JobError(
                f"{spec.name}: {name} is {dtype}, and weights that are trained are kept in fp32",
                "build the model in fp32 (model.float()); train.precision says in what it computes",
            )


def _refuse_sparse_gradients(module: nn.Module, spec: ModelSpec) -> None:
    for name, table in module.named_modules():
        if isinstance(table, (nn.Embedding, nn.EmbeddingBag)) and table.sparse and table.weight.requires_grad:
            raise JobError(
                f"{spec.name}: {name or type(table).__name__} makes sparse gradients, and wanma sums and "
                "applies them as whole tensors",
                "build it with sparse=False",
            )


def _refuse_what_depends_on_the_layout(module: nn.Module, spec: ModelSpec, plan: Plan) -> None:
    """Refuse modules that cannot give the same numbers on several ranks."""
    if (drawing := unkeyed_randomness(module)) and (splits := _splits(plan)):
        raise JobError(
            f"{spec.name}: {drawing[0]} draws random numbers, which cannot be keyed by sample under {splits}",
            "use nn.Dropout modules, or data-parallel axes alone (dp_replicate, dp_shard) without compile",
        )
    if plan.data_ranks == 1:
        return
    if coupled := couples_samples(module):
        raise JobError(
            f"{spec.name}: {coupled[0]} computes statistics over whatever samples share a micro-batch, so "
            f"{plan.data_ranks} data ranks would train another model than one",
            "let its forward call super().forward, or one of torch's batch normalisations: wanma makes their "
            "statistics those of model.batch_norm_group samples",
        )
    if keeping := keeps_statistics(module):
        raise JobError(
            f"{spec.name}: the running statistics of {keeping[0]} are of the samples that a rank sees, so "
            f"{plan.data_ranks} data ranks would evaluate another model than one",
            "let it keep none: track_running_stats=False",
        )


def _blocks(module: nn.Module, layout: Layout | None) -> list[nn.Module]:
    """Return the repeated blocks of this stage: declared, or found by structure."""
    if layout is None:
        return repeated_blocks(module)
    if layout.blocks is None:
        return []
    blocks = module.get_submodule(layout.blocks).children()
    return [block for block in blocks if any(True for _ in block.parameters())]


def _experts(module: nn.Module, layout: Layout | None) -> list[nn.Module]:
    pattern = layout.experts if layout is not None else None
    return [m for name, m in module.named_modules() if pattern is not None and fnmatchcase(name, pattern)]
