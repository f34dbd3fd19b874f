"""What the record of a step says beyond loss and time, read off the parts that know it."""

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
    """Seconds by phase, and those of communication by kind.

    What is waited inside forward and backward for other data ranks is moved to its own phase. Of a GPU
    the host's clock does not know what it waits for.
    """
    phases, spent = timer.take(), communication.take()
    if device != "cpu":
        return phases, Spent({}, {})
    inside = spent.waited.get("data", 0.0)
    phases["communication"] += inside
    phases["forward_backward"] = max(phases["forward_backward"] - inside, 0.0)
    return phases, spent


def expert_numbers(noted: Mapping[str, Tensor], targets: float) -> dict[str, float]:
    """How uneven the load of experts is, and the loss against it, per target."""
    numbers = {name: float(number) for name, number in noted.items()}
    if "balance_loss" in numbers:
        numbers["balance_loss"] /= targets
    return numbers


def compression_numbers(compression: GradientCompression | None) -> dict[str, float]:
    """Of this rank's compressed gradients."""
    if compression is None:
        return {}
    traffic = compression.take_traffic()
    return {
        "gradient_bytes_sent": traffic.sent_bytes,
        "gradient_bytes_saved": traffic.saved_bytes,
        "compression_error_norm": compression.error_norm(),
    }


def watch_gpu(device: torch.device, tell: Callable[[str], None]) -> GpuSampler | None:
    """A sampler of this rank's GPU, where NVIDIA's Python package can be asked of it."""
    try:
        return GpuSampler(str(torch.cuda.get_device_properties(device).uuid)).__enter__()
    except WanmaError as error:
        tell(f"no GPU utilisation or power in this run's records: {error}")
        return None
