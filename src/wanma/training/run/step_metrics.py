"""Metrics in the record of a step beyond loss and time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from wanma.collectives.timing.communication_timer import Spent, Stopwatch
from wanma.job.errors import WanmaError
from wanma.observe.metrics.gpu import GpuSampler
from wanma.observe.metrics.phase_timer import PhaseTimer
from wanma.parallel.gradients.gradient_compression import GradientCompression


def take_phases(timer: PhaseTimer, communication: Stopwatch, device: str) -> tuple[dict[str, float], Spent]:
    """Return the seconds by phase, and those of communication by kind.

    Waits for other data ranks inside forward and backward are moved to their own phase. The host's clock does
    not see the waits of a GPU.
    """
    phases, spent = timer.take(), communication.take()
    if device != "cpu":
        return phases, Spent({}, {})
    inside = spent.waited.get("data", 0.0)
    phases["communication"] += inside
    phases["forward_backward"] = max(phases["forward_backward"] - inside, 0.0)
    return phases, spent


def expert_numbers(noted: Mapping[str, Tensor], targets: float) -> dict[str, float]:
    """Return the imbalance of the experts' load, and the balance loss per target."""
    numbers = {name: float(number) for name, number in noted.items()}
    if "balance_loss" in numbers:
        numbers["balance_loss"] /= targets
    return numbers


def compression_numbers(compression: GradientCompression | None) -> dict[str, float]:
    """Return the metrics of this rank's compressed gradients; empty without compression."""
    if compression is None:
        return {}
    traffic = compression.take_traffic()
    return {
        "gradient_bytes_sent": traffic.sent_bytes,
        "gradient_bytes_saved": traffic.saved_bytes,
        "compression_error_norm": compression.error_norm(),
    }


def watch_gpu(device: torch.device, tell: Callable[[str], None]) -> GpuSampler | None:
    """Open a sampler of this rank's GPU; None where NVIDIA's Python package cannot reach it."""
    try:
        return GpuSampler(str(torch.cuda.get_device_properties(device).uuid)).__enter__()
    except WanmaError as error:
        tell(f"no GPU utilisation or power in this run's records: {error}")
        return None
