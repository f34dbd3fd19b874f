"""Memory of a plan on its fullest rank, by kind.

Weights and optimizer state follow Rajbhandari et al. 2020; activations are the workload's elements
per layer (Korthikanti et al. 2022 adapted), of which the pipeline keeps several micro-batches.
"""

from __future__ import annotations

from wanma.job.forecast import Forecast, Workload
from wanma.job.plan import Plan

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}

CPU_RUNTIME_BYTES = 340 << 20
"""Resident memory of a rank before its model exists: Python, torch, dynamo and their libraries."""

STATE_COPIES = {"adamw": 2, "sgd": 1, "adafactor": 0, "muon": 1}
"""Master-precision copies of a parameter that the update rule keeps."""


def forecast_memory(workload: Workload, plan: Plan, optimizer: str) -> Forecast:
    """What one rank needs, if the model is spread evenly over pipeline stages."""
    held = workload.parameters / (plan.pp * plan.tp)
    master = 8 if plan.precision == "fp64" else 4
    compute = BYTES[plan.precision]
    sharded = held / plan.dp_shard

    # FSDP2 keeps the sharded master copy, and gathers a copy in compute precision.
    gathered = _largest_layer(workload, plan) * 2 if plan.shard == "parameters" else held
    aliased = plan.dp_shard == 1 and compute == master
    parameters = sharded * master + (0 if aliased else gathered * compute)
    gradients = sharded * master + (held * compute if plan.shard in ("nothing", "optimizer") else 0)
    if plan.dp_shard == 1 and compute == master:
        gradients = held * master
    state = sharded * master * STATE_COPIES[optimizer]

    rows = plan.micro_batch * _in_flight(plan)
    blocks = [layer for layer in workload.layers if layer.count > 1] or list(workload.layers)
    kept = sum(layer.count * layer.activation_elements_per_sample for layer in blocks) / plan.pp
    if plan.recompute == "full":
        deepest = max((layer.activation_elements_per_sample for layer in blocks), default=0.0)
        kept = kept * _INPUT_SHARE + deepest
    activations = kept * rows * compute / plan.tp
    rest = sum(layer.activation_elements_per_sample for layer in workload.layers if layer not in blocks)
    logits = rest * plan.micro_batch * (compute + 4)

    return Forecast(
        parameters_bytes=int(parameters),
        gradients_bytes=int(gradients),
        optimizer_bytes=int(state),
        activations_bytes=int(activations),
        logits_bytes=int(logits),
        runtime_bytes=CPU_RUNTIME_BYTES if plan.device == "cpu" else 0,
    )


_INPUT_SHARE = 1 / 16
"""Share of a block's kept activations that is its input; about 1 of 16 hidden-sized tensors in a decoder."""


def _in_flight(plan: Plan) -> int:
    """Micro-batches whose activations the first stage holds at once under 1F1B."""
    return plan.pp


def _largest_layer(workload: Workload, plan: Plan) -> float:
    return max((layer.parameters for layer in workload.layers), default=0) / plan.tp
