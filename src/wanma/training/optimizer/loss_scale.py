"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018); a scale of one for everything else.

A step is skipped also where an element of the summed gradient is so large that fp16 may not have held it.
Which numbers overflow depends on the layout: a rank adds up the gradients of its micro-batch in fp16, while
sums over micro-batches and ranks are in fp32. The sum over the entire batch is the same on all layouts.
"""

from __future__ import annotations

from dataclasses import dataclass

from wanma.job.sections.train import TrainSection

GROWTH_INTERVAL = 2000
"""Steps without overflow after which the scale doubles."""
MAX_SCALED_GRADIENT = 65504.0 / 4
"""Largest allowed element of a scaled gradient: a quarter of the largest fp16 number.

Sums over parts of a batch may be larger than the sum over all of it.
"""
MIN_SCALE = 1.0
"""Smallest scale; a gradient that overflows at it is not the scale's fault."""


@dataclass
class LossScale:
    """Loss scale of a run, the same on every rank, because overflow is judged on the global norm."""

    value: float
    enabled: bool
    good_steps: int = 0

    @classmethod
    def from_section(cls, train: TrainSection) -> LossScale:
        enabled = train.precision == "fp16"
        return cls(train.loss_scale if enabled else 1.0, enabled)

    def is_too_large_for(self, largest_gradient: float) -> bool:
        """Return whether gradients with this largest element need a smaller scale."""
        return self.value > MIN_SCALE and largest_gradient > MAX_SCALED_GRADIENT

    def record_overflow(self) -> None:
        self.value, self.good_steps = max(self.value / 2, MIN_SCALE), 0

    def record_success(self) -> None:
        if not self.enabled:
            return
        self.good_steps += 1
        if self.good_steps == GROWTH_INTERVAL:
            self.value, self.good_steps = self.value * 2, 0
