"""Metrics in the record of a step beyond loss and time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from wanma.job.errors import WanmaError
from wanma.observe.metrics.gpu import GpuSampler
from wanma.parallel.gradients.gradient_compression import GradientCompression


def expert_metrics(statistics: Mapping[str, Tensor], target_count: float) -> dict[str, float]:
    """Return the imbalance of the experts' load, and the balance loss per target."""
    numbers = {name: float(number) for name, number in statistics.items()}
    if "balance_loss" in numbers:
        numbers["balance_loss"] /= target_count or math.nan
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
