"""Metrics of a step beyond loss and time: model FLOPs utilization."""

from __future__ import annotations

import pytest

from wanma.training.run.step_metrics import model_flops_utilization


def test_utilization_is_model_flops_over_peak() -> None:
    # 32 samples of 6 GFLOP in 2 s on 2 devices of 100 GFLOP/s: 96 of 200 GFLOP/s.
    assert model_flops_utilization(6e9, 32, 2.0, 2, 1e11) == pytest.approx(0.48)


@pytest.mark.parametrize(("seconds", "peak"), [(0.0, 1e12), (1.0, None), (1.0, 0.0)])
def test_utilization_is_unknown_without_time_or_peak(seconds: float, peak: float | None) -> None:
    assert model_flops_utilization(1e9, 1, seconds, 1, peak) is None
