"""Model FLOPs utilisation, in the one convention that all of wanma's numbers use."""

from __future__ import annotations


def model_flops_utilization(
    flops_per_sample: float, samples: int, seconds: float, devices: int, peak: float | None
) -> float | None:
    """Share of the devices' peak that the model's own arithmetic used (Chowdhery et al. 2022, appendix B).

    The convention: model FLOPs are the multiply-adds × 2 of forward and backward (three times forward),
    attention counted causally (only the half of the scores that is used), without what is recomputed
    and without the optimizer; the peak is dense and of the precision of the products.

    Args:
        flops_per_sample: forward and backward of one sample, `Workload.flops_per_sample`.
        samples: trained on in `seconds`, by all devices together.
        seconds: wall clock, everything included.
        devices: that took part.
        peak: FLOP/s of one device; None or 0 when unknown.

    Returns:
        A share (0.5 is 50 %), or None when the peak is unknown or no time passed.
    """
    if not peak or seconds <= 0 or devices <= 0:
        return None
    return flops_per_sample * samples / (seconds * devices * peak)
