"""Dry run of one rank of any plan on one machine: it fills no memory and sends nothing.

The rank is real: the same functions cut, shard and run the model as in training. Only its tensors have shapes
without storage (torch's fake tensors) and its process group answers without asking anybody.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from wanma.data.batch import Batch
from wanma.job.plan.plan import Plan
from wanma.models.keyed_random.dropout import keyed_samples
from wanma.models.model_spec import ModelSpec
from wanma.parallel.context.sequence_shards import residual_positions, split_sequence
from wanma.parallel.data_parallel.sharded import DTYPES
from wanma.parallel.mesh.parallel_mesh import Grid, build_grid
from wanma.parallel.parallelize import Parallel, parallelize
from wanma.parallel.pipeline.pipeline_runner import SAMPLES
from wanma.parallel.profiling.collective_counter import Collective, CollectiveRecorder
from wanma.training.loss.cross_entropy import cross_entropy_sum


@dataclass(frozen=True)
class DryRun:
    """Size and communication of one rank of a plan, as built."""

    rank: int
    parameters: int
    """Number of elements that this rank keeps between steps."""
    parameter_bytes: int
    gradient_bytes: int
    saved_bytes: int
    """Bytes of the tensors that autograd saves for one micro-batch, parameters left out."""
    micro_batches: int
    collectives: tuple[tuple[Collective, int], ...]
    """Collectives of one step with their counts, largest first."""
    seconds: float


def dry_run(spec: ModelSpec, plan: Plan, rank: int, sequence_length: int, micro_batches: int) -> DryRun:
    """Build `rank` of `plan` and take one step.

    It runs once per process: torch caches by mesh what it found out of a rank's place in it, and another
    rank's mesh of the same plan is equal to it.

    Args:
        spec: model that takes tokens.
        plan: plan of any size.
        rank: rank to build.
        sequence_length: tokens of a sample.
        micro_batches: micro-batches of the step.

    Raises:
        WanmaError: the plan asks for a split that this model does not declare.
        ValueError: there is no such rank.
    """
    started = time.perf_counter()
    plan.coordinates(rank)
    plan = replace(plan, compile=False, offload_parameters="none", offload_activations="none")
    # The nodes of the ranks are unknown here: a hierarchical sum is shown as one all-reduce.
    plan = replace(plan, hierarchical=False)
    with _fake_world(plan.world_size, rank):
        grid = replace(build_grid(plan, rank, torch.device("cpu")), device=torch.device("meta"))
        parallel = parallelize(spec, plan, grid, seed=0)
        parallel.draws.is_watching = False
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode(allow_non_fake_inputs=True):
            for part in parallel.parts:
                part.to_empty(device="cpu")
            counts, saved = _step(parallel, plan, grid, sequence_length, micro_batches)
            held = [parameter for _, parameter in parallel.named_parameters()]
            local = [p.to_local() if isinstance(p, DTensor) else p for p in held]
            gradients = [p.grad for p in held if p.grad is not None]
            return DryRun(
                rank=rank,
                parameters=sum(tensor.numel() for tensor in local),
                parameter_bytes=_bytes(local),
                gradient_bytes=_bytes(g.to_local() if isinstance(g, DTensor) else g for g in gradients),
                saved_bytes=saved,
                micro_batches=micro_batches,
                collectives=tuple(sorted(counts.items(), key=lambda item: -item[0].tensor_bytes * item[1])),
                seconds=time.perf_counter() - started,
            )


def _step(
    parallel: Parallel, plan: Plan, grid: Grid, sequence_length: int, micro_batches: int
) -> tuple[Counter[Collective], int]:
    """Run the micro-batches of a step; one stands for all between the first and the last."""
    total: Counter[Collective] = Counter()
    saved = 0
    kinds = [(1, False), (micro_batches - 2, False), (1, True)] if micro_batches > 1 else [(1, True)]
    for times, last in kinds:
        if times == 0:
            continue
        with CollectiveRecorder() as recorder:
            numbers = plan.stages_of(grid.at("pp"))
            saved = 0
            parallel.begin_micro_batch(last)
            for part, number in zip(parallel.parts, numbers, strict=True):
                kept, messages = _micro_batch(part, number, plan, grid, sequence_length)
                saved += kept
                recorder.counts.update(messages)
            if last:
                parallel.end_backward()
                dist.all_reduce(
                    torch.zeros(4, dtype=torch.float64)
                )  # the step's numbers: training/step/parameter_update.py
        for collective, count in recorder.counts.items():
            total[collective] += count * times
    return total, saved


def _micro_batch(
    part: nn.Module, number: int, plan: Plan, grid: Grid, length: int
) -> tuple[int, list[Collective]]:
    """Run forward and backward of one stage.

    Returns:
        the bytes kept in between, and the messages to and from the neighbouring stages.
    """
    whole = _batch(plan.micro_batch, length)
    batch = split_sequence(whole, grid)
    positions = residual_positions(whole, plan, grid.rank)
    keywords, messages = dict(batch.keywords), []
    if number == 0:
        (given,) = batch.inputs
    else:
        here = length if positions is None else len(positions)
        width = int(part.dimensions.hidden)  # type: ignore[union-attr,arg-type]  # what can be staged has them
        given = torch.zeros(plan.micro_batch, here, width, dtype=DTYPES[plan.precision], requires_grad=True)
        messages += _messages(given, number, number - 1, plan, grid.rank)
    if plan.pp > 1:
        keywords[SAMPLES] = batch.samples
    announced = nullcontext() if plan.pp > 1 else keyed_samples(part, 0, batch.samples, positions)
    with announced, _saved_bytes(part) as saved:
        output = part(given, **keywords)
        if number == plan.stages - 1:
            loss = cross_entropy_sum(output, batch.targets)
        else:
            messages += _messages(output, number, number + 1, plan, grid.rank)
            loss = output.sum()
        kept = saved()
    loss.backward()
    return kept, messages


def _batch(rows: int, length: int) -> Batch:
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    return Batch((tokens,), tokens, torch.zeros(rows, dtype=torch.int64), torch.ones(rows, dtype=torch.bool))


def _messages(hidden: Tensor, stage: int, other: int, plan: Plan, rank: int) -> list[Collective]:
    """Return the messages of hidden states one way and of their gradient back; none within one rank."""
    owners = {number: at for at in range(plan.pp) for number in plan.stages_of(at)}
    there = rank + (owners[other] - owners[stage]) * plan.stage_ranks
    if there == rank:
        return []
    ranks = (min(rank, there), max(rank, there))
    size = hidden.numel() * hidden.element_size()
    return [Collective("send", ranks, size), Collective("receive", ranks, size)]


@contextmanager
def _saved_bytes(part: nn.Module) -> Iterator[Callable[[], int]]:
    """Count the bytes of the storages that autograd saves inside, without parameters; each storage once."""
    own = {_storage(parameter) for parameter in part.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        key = _storage(local)
        if key not in own:
            kept[key] = local.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: sum(kept.values())


def _storage(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    key: int = local.untyped_storage()._cdata
    return key


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@contextmanager
def _fake_world(world_size: int, rank: int) -> Iterator[None]:
    """Open a process group of any size whose operations return at once, as torch tests its own with."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
