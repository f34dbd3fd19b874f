"""Step time of a decoder under a plan: costs of its layers, collected into stages.

`cost.step` assembles the stages to an optimizer step. Pure functions, without torch.
"""

from __future__ import annotations

from wanma.job.forecast.forecast import StepTime
from wanma.job.plan.plan import Plan
from wanma.models.config.dimensions import DecoderDimensions
from wanma.models.workload.sublayer_cost import attention_half, feed_forward_half
from wanma.planner.cost.decoder_layers import Software, block_time, embedding_time, head_time
from wanma.planner.cost.model_cost import Blocks, End, Pieces, stages_of
from wanma.planner.cost.step import Anatomy, anatomy_of_stages, step_of
from wanma.planner.hardware_model.collective_time import Group, all_gather_seconds, send_seconds
from wanma.planner.hardware_model.model import Machine
from wanma.planner.hardware_model.operator_time import ELEMENT_BYTES
from wanma.planner.pipeline.schedules import blocks_of_stages


def step_time(
    dimensions: DecoderDimensions,
    sequence: int,
    plan: Plan,
    global_batch: int,
    machine: Machine,
    software: Software | None = None,
    in_flight: int | None = None,
) -> StepTime:
    """Return the forecast of one optimizer step of `global_batch` sequences of `sequence` tokens.

    Args:
        in_flight: largest number of in-flight micro-batches, as in `pipeline_seconds`.

    Raises:
        ValueError: the hardware model has fewer devices than the plan has ranks, or no rate for its
            precision.
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
    """Return the components from which `step_time` is assembled; arguments and errors as there."""
    software = software or Software(fused=plan.compile)
    return anatomy_of_stages(
        stages_of(decoder_pieces(dimensions, sequence, plan, machine, software), plan),
        plan,
        plan.accumulation(global_batch),
        machine,
        software,
        boundary_seconds=boundary_seconds(dimensions, sequence, plan, machine),
        in_flight=in_flight,
    )


def stage_blocks(dimensions: DecoderDimensions, plan: Plan) -> list[int]:
    """Return the number of blocks in every stage of the plan."""
    return blocks_of_stages(dimensions.layers, plan)


def decoder_pieces(
    dimensions: DecoderDimensions, sequence: int, plan: Plan, machine: Machine, software: Software
) -> Pieces:
    """Return the layer costs of a decoder; only the settings of the plan in `pieces_key` influence them."""
    table = float(dimensions.vocabulary or 0) * dimensions.hidden
    embedding = embedding_time(dimensions, sequence, plan, machine, software)
    head = head_time(dimensions, sequence, plan, machine, software)
    is_shared = dimensions.tie_embeddings and plan.pp == 1
    return Pieces(
        (End(embedding, table),),
        decoder_blocks(dimensions, sequence, plan, machine, software),
        (End(head, 0.0 if is_shared else table),),
    )


def decoder_blocks(
    dimensions: DecoderDimensions, sequence: int, plan: Plan, machine: Machine, software: Software
) -> tuple[Blocks, ...]:
    """Return the costs of a decoder's blocks, one entry for each kind; arguments as in `decoder_pieces`."""

    def blocks(count: int, *, experts: bool) -> Blocks:
        part = block_time(dimensions, sequence, plan, machine, software, experts=experts)
        return Blocks(part, count, _block_parameters(dimensions, plan, software, experts=experts))

    dense = dimensions.dense_layers if dimensions.experts else dimensions.layers
    sparse = dimensions.layers - dense
    return tuple(
        blocks(count, experts=experts) for count, experts in ((dense, False), (sparse, True)) if count
    )


def _block_parameters(
    dimensions: DecoderDimensions, plan: Plan, software: Software, *, experts: bool
) -> float:
    """Return the parameters of one block, before `tp`, on one rank of `ep`."""
    attention = attention_half(dimensions).parameters
    half = feed_forward_half(dimensions, experts=experts)
    dense = half.parameters - half.experts
    # Counts are before `tp`; the factor undoes its division for experts that it does not split.
    experts_here = half.experts / plan.ep * (1 if software.splits_experts else plan.tp)
    return attention + dense + experts_here


def boundary_seconds(dimensions: DecoderDimensions, sequence: int, plan: Plan, machine: Machine) -> float:
    """Return the seconds of sending a stage's output to the next pipeline rank.

    Each `tp` rank sends its part; the receivers gather the whole where the sequence is not split (Narayanan
    et al. 2021, section 4.1).
    """
    if plan.pp == 1:
        return 0.0
    element = ELEMENT_BYTES[plan.precision]
    whole = plan.micro_batch * sequence / plan.cp * dimensions.hidden * element
    seconds = send_seconds(machine, plan.stage_ranks, whole / plan.tp)
    return seconds if plan.sequence_parallel else seconds + all_gather_seconds(machine, Group(plan.tp), whole)
