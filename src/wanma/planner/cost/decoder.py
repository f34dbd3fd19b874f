"""Step time of a decoder under a plan: costs of its layers, collected into stages.

`cost.step` assembles the stages to an optimizer step. Pure functions, without torch.
"""

from __future__ import annotations

from wanma.job.plan.plan import Plan
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.workload.sublayer_cost import attention_cost, feed_forward_cost
from wanma.planner.cost.decoder_layers import FrameworkTraits, block_cost, embedding_cost, head_cost
from wanma.planner.cost.model_cost import BlockGroup, EndLayer, ModelCost, build_stages
from wanma.planner.cost.step import StepComponents, build_step_components
from wanma.planner.hardware_model.collective_time import RankGroup, all_gather_seconds, send_seconds
from wanma.planner.hardware_model.model import HardwareModel
from wanma.planner.hardware_model.operator_time import ELEMENT_BYTES


def decoder_step_components(
    dimensions: DecoderConfig,
    sequence_length: int,
    plan: Plan,
    global_batch: int,
    hardware: HardwareModel,
    framework: FrameworkTraits | None = None,
    in_flight: int | None = None,
) -> StepComponents:
    """Return the components of one optimizer step of `global_batch` sequences of `sequence_length` tokens.

    Args:
        in_flight: largest number of in-flight micro-batches, as in `simulate_pipeline`.

    Raises:
        ValueError: the hardware model has fewer devices than the plan has ranks, or no rate for its
            precision.
    """
    framework = framework or FrameworkTraits(fuses_pointwise=plan.compile)
    return build_step_components(
        build_stages(decoder_model_cost(dimensions, sequence_length, plan, hardware, framework), plan),
        plan,
        plan.gradient_accumulation_steps(global_batch),
        hardware,
        framework,
        stage_send_seconds=decoder_stage_send_seconds(dimensions, sequence_length, plan, hardware),
        in_flight=in_flight,
    )


def decoder_model_cost(
    dimensions: DecoderConfig,
    sequence_length: int,
    plan: Plan,
    hardware: HardwareModel,
    framework: FrameworkTraits,
) -> ModelCost:
    """Return the layer costs of a decoder; of the plan only the settings in `model_cost_key` count."""
    table = float(dimensions.vocabulary or 0) * dimensions.hidden
    embedding = embedding_cost(dimensions, sequence_length, plan, hardware, framework)
    head = head_cost(dimensions, sequence_length, plan, hardware, framework)
    is_shared = dimensions.tie_embeddings and plan.pp == 1
    return ModelCost(
        (EndLayer(embedding, table),),
        decoder_block_groups(dimensions, sequence_length, plan, hardware, framework),
        (EndLayer(head, 0.0 if is_shared else table),),
    )


def decoder_block_groups(
    dimensions: DecoderConfig,
    sequence_length: int,
    plan: Plan,
    hardware: HardwareModel,
    framework: FrameworkTraits,
) -> tuple[BlockGroup, ...]:
    """Return the costs of a decoder's blocks, one for each kind; arguments as in `decoder_model_cost`."""

    def blocks(count: int, *, experts: bool) -> BlockGroup:
        part = block_cost(dimensions, sequence_length, plan, hardware, framework, experts=experts)
        return BlockGroup(part, count, _block_parameters(dimensions, plan, framework, experts=experts))

    dense = dimensions.dense_layers if dimensions.experts else dimensions.layers
    sparse = dimensions.layers - dense
    return tuple(
        blocks(count, experts=experts) for count, experts in ((dense, False), (sparse, True)) if count
    )


def _block_parameters(
    dimensions: DecoderConfig, plan: Plan, framework: FrameworkTraits, *, experts: bool
) -> float:
    """Return the parameters of one block, before `tp`, on one rank of `ep`."""
    attention = attention_cost(dimensions).parameters
    feed_forward = feed_forward_cost(dimensions, has_experts=experts)
    dense = feed_forward.parameters - feed_forward.expert_parameters
    # Counts are before `tp`; the factor undoes its division for experts that it does not split.
    experts_here = feed_forward.expert_parameters / plan.ep * (1 if framework.splits_experts else plan.tp)
    return attention + dense + experts_here


def decoder_stage_send_seconds(
    dimensions: DecoderConfig, sequence_length: int, plan: Plan, hardware: HardwareModel
) -> float:
    """Return the seconds of sending a stage's output to the next pipeline rank.

    Each `tp` rank sends its part; the receivers gather the whole where the sequence is not split (Narayanan
    et al. 2021, section 4.1).
    """
    if plan.pp == 1:
        return 0.0
    element = ELEMENT_BYTES[plan.precision]
    output_bytes = plan.micro_batch * sequence_length / plan.cp * dimensions.hidden * element
    seconds = send_seconds(hardware, plan.ranks_per_pipeline_rank, output_bytes / plan.tp)
    return (
        seconds
        if plan.sequence_parallel
        else seconds + all_gather_seconds(hardware, RankGroup(plan.tp), output_bytes)
    )
