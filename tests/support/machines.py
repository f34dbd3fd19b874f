"""Machines with round numbers, for tests of forecasts."""

from __future__ import annotations

from wanma.planner.hardware_model.model import (
    AttentionCurve,
    DeviceModel,
    HardwareModel,
    LinkLevel,
    MatmulCurve,
)

CHIP = DeviceModel(
    name="test chip",
    peak_flops_per_second={"bf16": 100e12, "fp16": 100e12, "fp8": 200e12},
    bandwidth_bytes_per_second=1e12,
    multiprocessors=100,
    products={
        "bf16": MatmulCurve(attainable=0.8, fill=128),
        "fp16": MatmulCurve(attainable=0.8, fill=128),
        "fp8": MatmulCurve(attainable=0.7, fill=256),
    },
    attention=AttentionCurve(attainable=0.5, fill=512, backward=0.8),
    bandwidth_share=0.8,
    launch_seconds=2e-6,
)


def machine(
    devices: int = 32, *, inner: float = 100e9, outer: float = 10e9, latency: float = 1e-6
) -> HardwareModel:
    """Nodes of eight."""
    return HardwareModel(
        CHIP,
        (LinkLevel(8, latency, inner), LinkLevel(max(devices, 16), 5 * latency, outer)),
        start_seconds=0.0,
    )
