"""Benchmark of the framework overhead on a CPU, and the fit of its seconds.

    for operator, plan in plans(ranks).items():
        ...                                        # seconds of one of MICRO_BATCHES of `DIMENSIONS`
    program = fit_framework_overhead(machine, points)      # for forecasts

The benchmark trains a decoder so small that little other time is left. Single operators, one after the other,
show less than half of the overhead: around each there are modules, views, and autograd's records; around a
block that is split, gathered or reduced, the work of torch's DTensor and FSDP2. The overhead is the measured
time minus a forecast without it. Pure functions, without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from wanma.job.plan.plan import Plan
from wanma.models.config.dimensions import DecoderConfig
from wanma.planner.cost.decoder import decoder_step_components
from wanma.planner.hardware_model.calibration import BenchmarkKind, BenchmarkPoint
from wanma.planner.hardware_model.model import FrameworkOverhead, HardwareModel

BLOCKS = 4
DIMENSIONS = DecoderConfig(layers=BLOCKS, hidden=32, heads=4, kv_heads=4, feed_forward=64, vocabulary=64)
SEQUENCE_LENGTH = 16
MICRO_BATCHES = 100
"""Micro-batches of a step; with so many, work that is done once a step counts for next to nothing."""

_BASELINE: BenchmarkKind = "blocks"
_FIELDS: Mapping[BenchmarkKind, str] = {
    "blocks_tensor": "tensor_seconds",
    "blocks_gradients": "gradients_seconds",
    "blocks_parameters": "parameters_seconds",
}


def benchmark_plans(ranks: int) -> dict[BenchmarkKind, Plan]:
    """Return the plans that `ranks` of a CPU measure together, with micro-batches of one sequence."""
    plans = {_BASELINE: _plan(dp_replicate=ranks)}
    if ranks > 1:
        if ranks % 2 == 0:
            plans["blocks_tensor"] = _plan(tp=2, dp_replicate=ranks // 2, sequence_parallel=True)
        plans["blocks_gradients"] = _plan(dp_shard=ranks, shard="gradients")
        plans["blocks_parameters"] = _plan(dp_shard=ranks, shard="parameters")
    return plans


def _plan(**settings: object) -> Plan:
    return replace(Plan(micro_batch=1, device="cpu", precision="fp32"), **settings)  # type: ignore[arg-type]


def fit_framework_overhead(hardware: HardwareModel, points: Sequence[BenchmarkPoint]) -> FrameworkOverhead:
    """Return the framework overhead that the forecasts of `hardware` lack for these points' times.

    Args:
        hardware: hardware model with its other curves and links fitted; its framework overhead does not
            count.
    """
    measured = {point.operator: (point.shape[0], point.seconds) for point in points}
    if _BASELINE not in measured:
        return FrameworkOverhead()
    ranks, seconds = measured[_BASELINE]
    plans = benchmark_plans(ranks)
    kernel_free = micro_batch_seconds(replace(hardware, program=FrameworkOverhead()), plans[_BASELINE])
    per_kernel = micro_batch_seconds(
        replace(hardware, program=FrameworkOverhead(kernel_seconds=1.0)), plans[_BASELINE]
    )
    program = FrameworkOverhead(kernel_seconds=max(seconds - kernel_free, 0.0) / (per_kernel - kernel_free))
    extra = {
        name: max(measured[operator][1] - micro_batch_seconds(replace(hardware, program=program), plan), 0.0)
        / BLOCKS
        for operator, plan in plans.items()
        if (name := _FIELDS.get(operator)) is not None and operator in measured
    }
    return replace(program, **extra)


def micro_batch_seconds(hardware: HardwareModel, plan: Plan) -> float:
    """Return the forecast seconds of one micro-batch of the small decoder, forward and backward."""
    batch = MICRO_BATCHES * plan.data_parallel_size
    (cost,) = decoder_step_components(DIMENSIONS, SEQUENCE_LENGTH, plan, batch, hardware).costs
    return cost.seconds
