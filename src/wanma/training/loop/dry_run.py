"""Dry run of one rank of any plan on one node: it fills no memory and sends nothing.

The rank is real: the same functions cut, shard and run the model as in training. Only its tensors have shapes
without storage (torch's fake tensors) and its process group communicates with no other process.
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
from wanma.models.keyed_random.dropout import bind_samples
from wanma.models.model_spec import ModelSpec
from wanma.parallel.context.sequence_shards import residual_positions, shard_sequence
from wanma.parallel.mesh.parallel_mesh import ParallelMesh, build_mesh
from wanma.parallel.parallelize import ParallelModel, parallelize
from wanma.parallel.pipeline.pipeline_runner import SAMPLE_INDICES_KEYWORD
from wanma.parallel.precision.autocast import PRECISION_DTYPES
from wanma.parallel.profiling.collective_counter import CollectiveCall, CollectiveCounter
from wanma.torch_internals.autograd import storage_id
from wanma.training.loss.cross_entropy import cross_entropy_sum


@dataclass(frozen=True)
class DryRunResult:
    """Size and communication of one rank of a plan, as built."""

    rank: int
    parameter_elements: int
    """Number of elements that this rank keeps between steps."""
    parameter_bytes: int
    gradient_bytes: int
    activation_bytes: int
    """Bytes of the tensors that autograd saves for one micro-batch, parameters left out."""
    micro_batches: int
    collectives: tuple[tuple[CollectiveCall, int], ...]
    """Collectives of one step with their counts, largest first."""
    seconds: float


def dry_run(spec: ModelSpec, plan: Plan, rank: int, sequence_length: int, micro_batches: int) -> DryRunResult:
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
    plan = replace(plan, embedding_memory_bytes=None)
    # A sum made of messages, over nodes that are unknown here, is shown as one all-reduce.
    plan = replace(plan, all_reduce="backend")
    with _fake_process_group(plan.world_size, rank):
        grid = replace(build_mesh(plan, rank, torch.device("cpu")), device=torch.device("meta"))
        parallel = parallelize(spec, plan, grid, seed=0)
        parallel.random_draws.is_checking = False
        from wanma.torch_internals.fake_tensors import fake_tensor_mode

        with fake_tensor_mode():
            for part in parallel.model_parts:
                part.to_empty(device="cpu")
            counts, saved = _step(parallel, plan, grid, sequence_length, micro_batches)
            parameters = [parameter for _, parameter in parallel.named_parameters()]
            local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
            gradients = [p.grad for p in parameters if p.grad is not None]
            return DryRunResult(
                rank=rank,
                parameter_elements=sum(tensor.numel() for tensor in local),
                parameter_bytes=_bytes(local),
                gradient_bytes=_bytes(g.to_local() if isinstance(g, DTensor) else g for g in gradients),
                activation_bytes=saved,
                micro_batches=micro_batches,
                collectives=tuple(sorted(counts.items(), key=lambda item: -item[0].tensor_bytes * item[1])),
                seconds=time.perf_counter() - started,
            )


def _step(
    parallel_model: ParallelModel,
    plan: Plan,
    parallel_mesh: ParallelMesh,
    sequence_length: int,
    micro_batches: int,
) -> tuple[Counter[CollectiveCall], int]:
    """Run the micro-batches of a step; one stands for all between the first and the last."""
    total: Counter[CollectiveCall] = Counter()
    saved = 0
    kinds = [(1, False), (micro_batches - 2, False), (1, True)] if micro_batches > 1 else [(1, True)]
    for times, last in kinds:
        if times == 0:
            continue
        with CollectiveCounter() as recorder:
            numbers = plan.stages_of_pipeline_rank(parallel_mesh.coordinate("pp"))
            saved = 0
            parallel_model.begin_micro_batch(last)
            for part, number in zip(parallel_model.model_parts, numbers, strict=True):
                saved_bytes, messages = _micro_batch(part, number, plan, parallel_mesh, sequence_length)
                saved += saved_bytes
                recorder.counts.update(messages)
            if last:
                parallel_model.finalize_gradients()
                dist.all_reduce(
                    torch.zeros(4, dtype=torch.float64)
                )  # the step's numbers: training/step/parameter_update.py
        for collective, count in recorder.counts.items():
            total[collective] += count * times
    return total, saved


def _micro_batch(
    part: nn.Module, stage: int, plan: Plan, parallel_mesh: ParallelMesh, length: int
) -> tuple[int, list[CollectiveCall]]:
    """Run forward and backward of one stage.

    Returns:
        the bytes kept in between, and the messages to and from the neighbouring stages.
    """
    full_batch = _batch(plan.micro_batch, length)
    batch = shard_sequence(full_batch, parallel_mesh)
    positions = residual_positions(full_batch, plan, parallel_mesh.rank)
    keywords, messages = dict(batch.keywords), []
    if stage == 0:
        (stage_input,) = batch.inputs
    else:
        local_length = length if positions is None else len(positions)
        width = int(part.config.hidden)  # type: ignore[union-attr,arg-type]  # what can be staged has them
        stage_input = torch.zeros(
            plan.micro_batch, local_length, width, dtype=PRECISION_DTYPES[plan.precision], requires_grad=True
        )
        messages += _stage_messages(stage_input, stage, stage - 1, plan, parallel_mesh.rank)
    if plan.pp > 1:
        keywords[SAMPLE_INDICES_KEYWORD] = batch.samples
    announced = nullcontext() if plan.pp > 1 else bind_samples(part, 0, batch.samples, positions)
    with announced, _saved_bytes(part) as saved:
        output = part(stage_input, **keywords)
        if stage == plan.stage_count - 1:
            loss = cross_entropy_sum(output, batch.targets)
        else:
            messages += _stage_messages(output, stage, stage + 1, plan, parallel_mesh.rank)
            loss = output.sum()
        saved_bytes = saved()
    loss.backward()
    return saved_bytes, messages


def _batch(rows: int, length: int) -> Batch:
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    return Batch((tokens,), tokens, torch.zeros(rows, dtype=torch.int64), torch.ones(rows, dtype=torch.bool))


def _stage_messages(
    hidden: Tensor, stage: int, peer_stage: int, plan: Plan, rank: int
) -> list[CollectiveCall]:
    """Return the messages of hidden states one way and of their gradient back; none within one rank."""
    owners = {number: at for at in range(plan.pp) for number in plan.stages_of_pipeline_rank(at)}
    peer_rank = rank + (owners[peer_stage] - owners[stage]) * plan.ranks_per_pipeline_rank
    if peer_rank == rank:
        return []
    ranks = (min(rank, peer_rank), max(rank, peer_rank))
    size = hidden.numel() * hidden.element_size()
    return [CollectiveCall("send", ranks, size), CollectiveCall("receive", ranks, size)]


@contextmanager
def _saved_bytes(part: nn.Module) -> Iterator[Callable[[], int]]:
    """Count the bytes of the storages that autograd saves inside, without parameters; each storage once."""
    parameter_storages = {_storage_id(parameter) for parameter in part.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        key = _storage_id(local)
        if key not in parameter_storages:
            sizes[key] = local.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: sum(sizes.values())


def _storage_id(tensor: Tensor) -> int:
    return storage_id(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@contextmanager
def _fake_process_group(world_size: int, rank: int) -> Iterator[None]:
    """Open a process group of any size whose operations return at once, as torch tests its own with."""
    from wanma.torch_internals.fake_tensors import FAKE_BACKEND, FakeStore

    dist.init_process_group(FAKE_BACKEND, store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
