"""Metrics in the record of a step beyond loss and time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from wanma.collectives.timing.communication_timer import CommunicationTime, CommunicationTimer
from wanma.job.errors import WanmaError
from wanma.observe.metrics.gpu import GpuSampler
from wanma.observe.metrics.phase_timer import PhaseTimer
from wanma.parallel.gradients.gradient_compression import GradientCompression


def pop_phases(
    timer: PhaseTimer, communication: CommunicationTimer, device: str
) -> tuple[dict[str, float], CommunicationTime]:
    """Return the seconds by phase, and those of communication by kind.

    Waits for other data ranks inside forward and backward are moved to their own phase. The host's clock does
    not see the waits of a GPU.
    """
    phases, spent = timer.collect(), communication.take_totals()
    if device != "cpu":
        return phases, CommunicationTime({}, {})
    data_wait_seconds = spent.exposed_seconds.get("data", 0.0)
    phases["communication"] += data_wait_seconds
    phases["forward_backward"] = max(phases["forward_backward"] - data_wait_seconds, 0.0)
    return phases, spent


def expert_metrics(statistics: Mapping[str, Tensor], target_count: float) -> dict[str, float]:
    """Return the imbalance of the experts' load, and the balance loss per target."""
    numbers = {name: float(number) for name, number in statistics.items()}
    if "balance_loss" in numbers:
        numbers["balance_loss"] /= target_count
    return numbers


def compression_metrics(compression: GradientCompression | None) -> dict[str, float]:
    """Return the metrics of this rank's compressed gradients; empty without compression."""
    if compression is None:
        return {}
    traffic = compression.pop_traffic()
    return {
        "gradient_bytes_sent": traffic.sent_bytes,
        "gradient_bytes_saved": traffic.saved_bytes,
        "compression_error_norm": compression.error_norm(),
    }


def open_gpu_sampler(device: torch.device, warn: Callable[[str], None]) -> GpuSampler | None:
    """Open a sampler of this rank's GPU; None where NVIDIA's Python package cannot reach it."""
    try:
        return GpuSampler(str(torch.cuda.get_device_properties(device).uuid)).__enter__()
    except WanmaError as error:
        warn(f"GPU utilization and power are not recorded: {error}")
        return None
