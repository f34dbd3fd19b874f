"""Time of single operators: tiles, waves, roofs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.machines import CHIP
from wanma.planner.hardware_model.operator_time import attention_seconds, matmul_seconds, memory_bound_seconds

SIDES = st.integers(1, 20_000)


def test_a_product_of_endless_sides_attains_its_share_of_the_peak() -> None:
    m = n = 256 * 100
    k = 1_000_000
    rate = 2.0 * m * n * k / matmul_seconds(CHIP, m, n, k, "bf16")
    assert rate == pytest.approx(0.8 * 100e12, rel=1e-3)


def test_one_tile_more_than_a_wave_costs_another_wave() -> None:
    full = matmul_seconds(CHIP, 256 * 10, 128 * 10, 8192, "bf16")  # 100 tiles on 100 multiprocessors
    one_more = matmul_seconds(CHIP, 256 * 10 + 1, 128 * 10, 8192, "bf16")
    assert 1.2 < one_more / full <= 2.0


def test_short_sums_attain_less_by_what_it_takes_to_fill_a_tile() -> None:
    long, short = (matmul_seconds(CHIP, 25_600, 25_600, k, "bf16") - 2e-6 for k in (12_800, 128))
    assert long / short == pytest.approx((12_800 + 128) / (128 + 128))


def test_a_thin_product_costs_the_bytes_of_its_matrix() -> None:
    slow = replace(CHIP, bandwidth_bytes_per_second=0.1e12)
    seconds = matmul_seconds(slow, 1, 20_000, 20_000, "bf16")
    assert seconds == pytest.approx(2e-6 + 2 * (20_000 + 20_000 * 20_000 + 20_000) / 0.08e12)


def test_an_unmeasured_precision_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"nvfp4 .*: bf16, fp16, fp8"):
        matmul_seconds(CHIP, 1, 1, 1, "nvfp4")


@given(SIDES, SIDES, SIDES, st.integers(0, 5000), st.sampled_from(["m", "n", "k"]))
def test_a_larger_product_is_never_faster(m: int, n: int, k: int, more: int, side: str) -> None:
    sides = {"m": m, "n": n, "k": k}
    larger = {**sides, side: sides[side] + more}
    assert matmul_seconds(CHIP, **larger, precision="bf16") >= matmul_seconds(CHIP, **sides, precision="bf16")


@given(SIDES, SIDES, SIDES, st.floats(1.0, 4.0))
def test_a_faster_chip_never_takes_longer(m: int, n: int, k: int, factor: float) -> None:
    peaks = {name: peak * factor for name, peak in CHIP.peak_flops_per_second.items()}
    faster = replace(CHIP, peak_flops_per_second=peaks, bandwidth_bytes_per_second=1e12 * factor)
    assert matmul_seconds(faster, m, n, k, "fp8") <= matmul_seconds(CHIP, m, n, k, "fp8")
    assert attention_seconds(faster, 1, m, n, 8, 128) <= attention_seconds(CHIP, 1, m, n, 8, 128)


def test_causal_attention_is_half_and_its_backward_five_products_of_two() -> None:
    full, causal = (
        attention_seconds(CHIP, 4, 8192, 8192, 32, 128, causal=causal) for causal in (False, True)
    )
    assert full - 2e-6 == pytest.approx(2 * (causal - 2e-6))
    backward = attention_seconds(CHIP, 4, 8192, 8192, 32, 128, backward=True)
    assert backward - 2e-6 == pytest.approx((causal - 2e-6) * 2.5 / 0.8)


def test_attention_reaches_half_its_rate_at_the_length_of_its_fill() -> None:
    flops = 2.0 * 64 * 512 * 512 * 128
    seconds = attention_seconds(CHIP, 64, 512, 512, 1, 128, kv_heads=0) - 2e-6
    assert flops / seconds == pytest.approx(100e12 * 0.5 / 2)


def test_streaming_costs_its_bytes_and_its_launches() -> None:
    assert memory_bound_seconds(CHIP, 0.8e12, kernels=3) == pytest.approx(1 + 6e-6)
