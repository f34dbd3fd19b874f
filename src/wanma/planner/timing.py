"""Step time of a decoder under a plan: what its operators cost, stage by stage; `step` makes a step of them.

Pure functions, without torch.
"""

from __future__ import annotations

from wanma.job.forecast import StepTime
from wanma.job.plan import Plan
from wanma.models.block_workload import attention_half, feed_forward_half
from wanma.models.dimensions import DecoderDimensions
from wanma.planner.communication import Group, all_gather_seconds, send_seconds
from wanma.planner.machine import Machine
from wanma.planner.operators import PartTime, Software, block_time, embedding_time, head_time
from wanma.planner.stages import blocks_of_stages
from wanma.planner.step import Anatomy, Stage, anatomy_of_stages, step_of


def step_time(
    dimensions: DecoderDimensions,
    sequence: int,
    plan: Plan,
    global_batch: int,
    machine: Machine,
    software: Software | None = None,
    in_flight: int | None = None,
) -> StepTime:
    """Forecast of one optimizer step of `global_batch` sequences of `sequence` tokens.

    Args:
        in_flight: as of `pipeline_seconds`.

    Raises:
        ValueError: the machine has fewer devices than the plan's ranks, or no rate for its precision.
    """
    return step_of(step_anatomy(dimensions, sequence, plan, global_batch, machine, software, in_flight))


def step_anatomy(
    dimensions: DecoderDimensions,
    sequence: int,
    plan: Plan,
    global_batch: int,
    machine: Machine,
    software: Software | None = None,
    in_flight: int | None = None,
) -> Anatomy:
    """What `step_time` adds up; arguments and errors as there."""
    software = software or Software(fused=plan.compile)
    return anatomy_of_stages(
        _stages(dimensions, sequence, plan, machine, software),
        plan,
        plan.accumulation(global_batch),
        machine,
        software,
        boundary_seconds=_boundary_seconds(dimensions, sequence, plan, machine),
        in_flight=in_flight,
    )


def stage_blocks(dimensions: DecoderDimensions, plan: Plan) -> list[int]:
    """As `stages.blocks_of_stages`."""
    return blocks_of_stages(dimensions.layers, plan)


def _stages(
    dimensions: DecoderDimensions, sequence: int, plan: Plan, machine: Machine, software: Software
) -> list[Stage]:
    sparse_from = dimensions.dense_layers if dimensions.experts else dimensions.layers
    dense = block_time(dimensions, sequence, plan, machine, software)
    sparse = (
        block_time(dimensions, sequence, plan, machine, software, experts=True)
        if dimensions.experts
        else dense
    )
    dense_size = _block_parameters(dimensions, plan, software, experts=False)
    sparse_size = (
        _block_parameters(dimensions, plan, software, experts=True) if dimensions.experts else dense_size
    )
    head = head_time(dimensions, sequence, plan, machine, software)
    embedding = embedding_time(dimensions, sequence, plan, machine, software)
    table = float(dimensions.vocabulary or 0) * dimensions.hidden
    found: list[Stage] = []
    start = 0
    for stage, count in enumerate(stage_blocks(dimensions, plan)):
        dense_count = max(0, min(start + count, sparse_from) - start)
        ends: list[tuple[PartTime, float]] = []
        if stage == 0:
            ends.append((embedding, table))
        if stage == plan.stages - 1:
            is_shared = dimensions.tie_embeddings and plan.pp == 1
            ends.append((head, 0.0 if is_shared else table))
        parameters = dense_count * dense_size + (count - dense_count) * sparse_size
        parameters += sum(size for _, size in ends)
        blocks = ((dense, dense_count, dense_size), (sparse, count - dense_count, sparse_size))
        again = len(plan.recomputed(count)) / count if count else 0.0
        found.append(Stage(tuple(b for b in blocks if b[1]), again, tuple(ends), parameters))
        start += count
    return found


def _block_parameters(
    dimensions: DecoderDimensions, plan: Plan, software: Software, *, experts: bool
) -> float:
    attention = attention_half(dimensions).parameters
    half = feed_forward_half(dimensions, experts=experts)
    dense = half.parameters - half.experts
    if not software.gated and not experts:
        dense = 2 * dimensions.hidden * dimensions.feed_forward
    return attention + dense + half.experts / plan.ep


def _boundary_seconds(dimensions: DecoderDimensions, sequence: int, plan: Plan, machine: Machine) -> float:
    """A stage's output to the next rank: each rank of `tp` sends its part, and gathers the others' inside
    where the sequence is not split (Narayanan et al. 2021, section 4.1)."""
    if plan.pp == 1:
        return 0.0
    whole = plan.micro_batch * sequence / plan.cp * dimensions.hidden * 2.0
    distance = plan.world_size // plan.pp
    seconds = send_seconds(machine, distance, whole / plan.tp)
    return seconds if plan.sequence else seconds + all_gather_seconds(machine, Group(plan.tp), whole)
