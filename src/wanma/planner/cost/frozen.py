"""Layer costs of a decoder with frozen parts: products that backward omits, and products of adapters.

Backward of a product has one product for the gradient of its input and one for that of its weights; frozen
weights omit the second. Layers before the first trained one have no backward. Pure functions, without torch.
"""

from __future__ import annotations

from dataclasses import fields, replace

from wanma.job.forecast.forecast import LayerWorkload, Workload
from wanma.job.plan.plan import Plan
from wanma.planner.cost.decoder_layers import FrameworkTraits
from wanma.planner.cost.layer_cost import LayerCost
from wanma.planner.cost.model_cost import BlockGroup, ModelCost
from wanma.planner.cost.traced_module import operators_cost
from wanma.planner.hardware_model.model import HardwareModel

_BACKWARD_FIELDS = (
    "backward_input",
    "recompute",
    "tensor_backward",
    "tensor_recompute",
    "context_backward",
    "expert_backward",
)


def model_cost_with_frozen_parts(
    model_cost: ModelCost, workload: Workload, plan: Plan, hardware: HardwareModel, framework: FrameworkTraits
) -> ModelCost:
    """Return `model_cost` of a fully trained decoder, changed to the parts that `workload` trains."""
    if not has_frozen_parts(workload):
        return model_cost
    first, *_, last = workload.layers
    (before,), (after,) = model_cost.pre_block, model_cost.post_block
    return ModelCost(
        (before._replace(cost=_cost_with_frozen_parts(before.cost, first, plan, hardware, framework)),),
        block_groups_with_frozen_parts(model_cost.blocks, workload, plan, hardware, framework),
        (after._replace(cost=_cost_with_frozen_parts(after.cost, last, plan, hardware, framework)),),
    )


def block_groups_with_frozen_parts(
    block_groups: tuple[BlockGroup, ...],
    workload: Workload,
    plan: Plan,
    hardware: HardwareModel,
    framework: FrameworkTraits,
) -> tuple[BlockGroup, ...]:
    """Return `block_groups` of a fully trained decoder, changed to the parts that `workload` trains."""
    if not has_frozen_parts(workload):
        return block_groups
    layers = [layer for layer in workload.layers if layer.is_block]
    return tuple(
        kind._replace(cost=_cost_with_frozen_parts(kind.cost, layer, plan, hardware, framework))
        for kind, layer in zip(block_groups, layers, strict=True)
    )


def has_frozen_parts(workload: Workload) -> bool:
    """Return whether a part of the model is frozen."""
    return any(layer.trainable_parameters is not None for layer in workload.layers)


def _cost_with_frozen_parts(
    cost: LayerCost, layer: LayerWorkload, plan: Plan, hardware: HardwareModel, framework: FrameworkTraits
) -> LayerCost:
    """Return `cost` without frozen products and with adapters, averaged over the layer's `count`."""
    trained_share = layer.trainable_share
    adapters = LayerCost()
    if layer.operators:
        adapters = operators_cost(layer, plan, hardware, framework)
        trained_share = 0.0  # only the adapters are trained
    backward_share = layer.backward_share
    changed = {name: backward_share * getattr(cost, name) for name in _BACKWARD_FIELDS}
    cost = replace(
        cost,
        **changed,
        backward_weight=trained_share * cost.backward_weight,
        kernels_backward=round(backward_share * cost.kernels_backward),
        kernels_recompute=round(backward_share * cost.kernels_recompute),
    )
    names = [field.name for field in fields(cost)]
    return LayerCost(**{name: getattr(cost, name) + getattr(adapters, name) for name in names})
