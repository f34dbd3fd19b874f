"""Metrics in the record of a step beyond loss and time."""

from __future__ import annotations

from collections.abc import Callable

import torch

from wanma.job.errors import WanmaError
from wanma.observe.metrics.gpu import GpuSampler
from wanma.parallel.parallelize import ParallelModel


def parallel_metrics(model: ParallelModel) -> dict[str, float]:
    """Return the metrics of this rank's compressed gradients, and of its embedding rows on disk, if any."""
    metrics: dict[str, float] = {}
    if (compression := model.compression) is not None:
        traffic = compression.pop_traffic()
        metrics |= {
            "gradient_bytes_sent": traffic.sent_bytes,
            "gradient_bytes_saved": traffic.saved_bytes,
        }
    counts = [embedding.cache.pop_counts() for embedding in model.embeddings if embedding.cache is not None]
    if used := sum(count.used for count in counts):
        metrics["embedding_hit_rate"] = sum(count.in_memory for count in counts) / used
    return metrics


def open_gpu_sampler(device: torch.device, warn: Callable[[str], None]) -> GpuSampler | None:
    """Open a sampler of this rank's GPU; None where NVIDIA's Python package cannot reach it."""
    try:
        return GpuSampler(str(torch.cuda.get_device_properties(device).uuid))
    except WanmaError as error:
        warn(f"GPU utilization and power are not recorded: {error}")
        return None


def model_flops_utilization(
    flops_per_sample: float | None,
    samples: int,
    seconds: float,
    devices: int,
    peak_flops_per_second: float | None,
) -> float | None:
    """Return the share of the devices' peak that the model's own arithmetic used (0 .. 1).

    The convention is that of Chowdhery et al. 2022 (appendix B), but for attention: model FLOPs are the
    multiply-adds × 2 of forward and backward (three times forward), attention counted causally (only the half
    of the scores that is used), without recompute and without the optimizer; the peak is dense and of the
    precision of the products. `models.workload.flop_conventions` has those of published tables.

    Args:
        flops_per_sample: forward and backward of one sample, `Workload.flops_per_sample`; None when unknown.
        samples: samples trained in `seconds`, by all devices together.
        seconds: wall-clock time, everything included.
        devices: number of devices that took part.
        peak_flops_per_second: FLOP/s of one device; None or 0 when unknown.

    Returns:
        A share (0.5 is 50 %), or None when FLOPs or peak are unknown or no time passed.
    """
    if flops_per_sample is None or not peak_flops_per_second or seconds <= 0:
        return None
    return flops_per_sample * samples / (seconds * devices * peak_flops_per_second)
