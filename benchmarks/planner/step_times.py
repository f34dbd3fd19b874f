"""Forecast step time of a decoder and of any module under a plan, without a search."""

from __future__ import annotations

from wanma.job.forecast.forecast import StepTime, Workload
from wanma.job.plan.plan import Plan
from wanma.models.config.dimensions import DecoderConfig
from wanma.planner.cost.decoder import decoder_step_components
from wanma.planner.cost.decoder_layers import FrameworkTraits
from wanma.planner.cost.model_cost import build_stages
from wanma.planner.cost.step import assemble_step_time, build_step_components
from wanma.planner.cost.traced_module import has_operators, module_model_cost, module_stage_send_seconds
from wanma.planner.hardware_model.model import HardwareModel


def decoder_step_time(
    dimensions: DecoderConfig,
    sequence_length: int,
    plan: Plan,
    global_batch: int,
    hardware: HardwareModel,
    framework: FrameworkTraits | None = None,
    in_flight: int | None = None,
) -> StepTime:
    """Return the forecast of one optimizer step of `global_batch` sequences of `sequence_length` tokens.

    Args:
        in_flight: largest number of in-flight micro-batches, as in `simulate_pipeline`.

    Raises:
        ValueError: the hardware model has fewer devices than the plan has ranks, or no rate for its
            precision.
    """
    return assemble_step_time(
        decoder_step_components(
            dimensions, sequence_length, plan, global_batch, hardware, framework, in_flight
        )
    )


def module_step_time(
    workload: Workload,
    plan: Plan,
    global_batch: int,
    hardware: HardwareModel,
    framework: FrameworkTraits | None = None,
) -> StepTime:
    """Return the forecast of one optimizer step of `global_batch` samples.

    Every parameter is updated in every step, including rows of an embedding table that no sample reads:
    gradients are dense, except for tables that declare otherwise (`LayerWorkload.trainable_parameters`).

    Raises:
        ValueError: the layers' operators are not known (`LayerWorkload.operators`); the hardware model has
            fewer devices than the plan has ranks, or no rate for its precision.
    """
    if not has_operators(workload):
        raise ValueError("the operators of the model's layers are not known")
    framework = framework or FrameworkTraits(fuses_pointwise=plan.compile)
    components = build_step_components(
        build_stages(module_model_cost(workload, plan, hardware, framework), plan),
        plan,
        plan.gradient_accumulation_steps(global_batch),
        hardware,
        framework,
        stage_send_seconds=module_stage_send_seconds(workload, plan, hardware),
        trainable_share=workload.trainable_share,
    )
    return assemble_step_time(components)
