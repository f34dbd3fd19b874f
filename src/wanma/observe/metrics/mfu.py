"""Model FLOPs utilization (MFU), in the one convention of all numbers of wanma."""

from __future__ import annotations


def model_flops_utilization(
    flops_per_sample: float, samples: int, seconds: float, devices: int, peak_flops_per_second: float | None
) -> float | None:
    """Return the share of the devices' peak that the model's own arithmetic used (0 .. 1).

    The convention is that of Chowdhery et al. 2022 (appendix B), but for attention: model FLOPs are the
    multiply-adds × 2 of forward and backward (three times forward), attention counted causally (only the half
    of the scores that is used), without recompute and without the optimizer; the peak is dense and of the
    precision of the products. `models.workload.flop_conventions` has those of published tables.

    Args:
        flops_per_sample: forward and backward of one sample, `Workload.flops_per_sample`.
        samples: samples trained in `seconds`, by all devices together.
        seconds: wall-clock time, everything included.
        devices: number of devices that took part.
        peak_flops_per_second: FLOP/s of one device; None or 0 when unknown.

    Returns:
        A share (0.5 is 50 %), or None when the peak is unknown or no time passed.
    """
    if not peak_flops_per_second or seconds <= 0 or devices <= 0:
        return None
    return flops_per_sample * samples / (seconds * devices * peak_flops_per_second)
