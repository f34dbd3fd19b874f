"""Layer costs of a decoder with frozen parts: products that backward omits, and products of adapters.

Backward of a product has one product for the gradient of its input and one for that of its weights; frozen
weights omit the second. Layers before the first trained one have no backward. Pure functions, without torch.
"""

from __future__ import annotations

from dataclasses import fields, replace

from wanma.job.forecast.forecast import Layer, Workload
from wanma.job.plan.plan import Plan
from wanma.planner.cost.decoder_layers import PartTime, Software
from wanma.planner.cost.model_cost import Blocks, Pieces
from wanma.planner.cost.traced_module import operators_time
from wanma.planner.hardware_model.model import Machine

_OF_BACKWARD = (
    "backward_inputs",
    "again",
    "tensor_backward",
    "tensor_again",
    "context_backward",
    "expert_backward",
)


def trained_pieces(
    pieces: Pieces, workload: Workload, plan: Plan, machine: Machine, software: Software
) -> Pieces:
    """Return `pieces` of a fully trained decoder, changed to the parts that `workload` trains."""
    if not has_frozen_parts(workload):
        return pieces
    first, *_, last = workload.layers
    (before,), (after,) = pieces.before, pieces.after
    return Pieces(
        (before._replace(part=_trained(before.part, first, plan, machine, software)),),
        trained_blocks(pieces.blocks, workload, plan, machine, software),
        (after._replace(part=_trained(after.part, last, plan, machine, software)),),
    )


def trained_blocks(
    blocks: tuple[Blocks, ...], workload: Workload, plan: Plan, machine: Machine, software: Software
) -> tuple[Blocks, ...]:
    """Return `blocks` of a fully trained decoder, changed to the parts that `workload` trains."""
    if not has_frozen_parts(workload):
        return blocks
    layers = [layer for layer in workload.layers if layer.is_block]
    return tuple(
        kind._replace(part=_trained(kind.part, layer, plan, machine, software))
        for kind, layer in zip(blocks, layers, strict=True)
    )


def has_frozen_parts(workload: Workload) -> bool:
    """Return whether a part of the model is frozen."""
    return any(layer.trained_parameters is not None for layer in workload.layers)


def _trained(part: PartTime, layer: Layer, plan: Plan, machine: Machine, software: Software) -> PartTime:
    """Return `part` without frozen products and with adapters, averaged over the layer's `count`."""
    own = layer.trained_share
    adapters = PartTime()
    if layer.operators:
        adapters = operators_time(layer, plan, machine, software)
        own = 0.0  # only the adapters are trained
    reached = layer.reached_share
    changed = {name: reached * getattr(part, name) for name in _OF_BACKWARD}
    part = replace(
        part,
        **changed,
        backward_weights=own * part.backward_weights,
        kernels_backward=round(reached * part.kernels_backward),
        kernels_again=round(reached * part.kernels_again),
    )
    names = [one.name for one in fields(part)]
    return PartTime(**{name: getattr(part, name) + getattr(adapters, name) for name in names})
