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
        return GpuSampler(str(torch.cuda.get_device_properties(device).uuid)).__enter__()
    except WanmaError as error:
        warn(f"GPU utilization and power are not recorded: {error}")
        return None
