"""Time of single operators on one device: a roofline whose roof depends on shape and precision.

A matrix product is computed in tiles, as many at once as there are multiprocessors; the last wave of tiles is
as long as a full one (NVIDIA, "Matrix Multiplication Background", section 4.2), and each tile loses time
before its sum begins and after it ends. A memory-bound operator costs its bytes.
"""

from __future__ import annotations

import math

from wanma.planner.hardware_model.model import AttentionCurve, DeviceModel

ELEMENT_BYTES = {"fp64": 8.0, "fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "nvfp4": 0.5625}
"""Bytes of one operand's element; nvfp4 has one scale of 8 bits for 16 elements."""


def matmul_seconds(
    chip: DeviceModel,
    m: float,
    n: float,
    k: float,
    precision: str,
    count: int = 1,
    moved_elements: float | None = None,
) -> float:
    """Return the seconds of `count` independent products (m, k) × (k, n), launched as one batch.

    Args:
        precision: precision of the operands. The result has at least two bytes per element.
        moved_elements: elements that all products read and write, where it is not every operand once, as in a
            convolution with overlapping windows.

    Raises:
        ValueError: the chip has no rate for `precision`.
    """
    if min(m, n, k) <= 0:
        return 0.0
    rate = matmul_rate(chip, precision)
    curve = chip.products[precision]
    computed, multiprocessors, ceil = math.inf, chip.multiprocessors, math.ceil
    for rows, columns, share in chip.tiles:
        waves = ceil(count * ceil(m / rows) * ceil(n / columns) / multiprocessors)
        seconds = waves * (2.0 * rows * columns * (k + curve.fill) * multiprocessors) / (rate * share)
        if seconds < computed:
            computed = seconds
    element = ELEMENT_BYTES[precision]
    traffic = count * (element * (m * k + k * n) + max(element, 2.0) * m * n)
    if moved_elements is not None:
        traffic = element * moved_elements
    return chip.launch_seconds + max(computed, _memory_traffic_seconds(chip, traffic))


def matmul_rate(chip: DeviceModel, precision: str) -> float:
    """Return the FLOP/s that a product of infinite sides sustains.

    Raises:
        ValueError: the chip has no curve for `precision`.
    """
    if precision not in chip.products:
        known = ", ".join(sorted(chip.products))
        raise ValueError(f"{chip.name} has no measured rate for {precision} products; it has: {known}")
    return chip.peak_flops_per_second[precision] * chip.products[precision].attainable * chip.sustained


def attention_seconds(
    chip: DeviceModel,
    sequences: float,
    queries: float,
    keys: float,
    heads: float,
    head_dim: float,
    *,
    kv_heads: float | None = None,
    value_head_dim: float | None = None,
    causal: bool = True,
    backward: bool = False,
    efficiency: float = 1.0,
    precision: str = "bf16",
) -> float:
    """Return the seconds of fused attention, which stores no scores.

    Backward computes five products where forward has two (Dao et al. 2022, section 3.1).

    Args:
        queries: query tokens per sequence.
        keys: key tokens per sequence, of which a causal model needs half.
        efficiency: rate of an older kernel over the measured one's.
        precision: precision of queries, keys and values; an unmeasured one counts as 16 bits.
    """
    width = (head_dim + (head_dim if value_head_dim is None else value_head_dim)) * heads
    flops = 2.0 * sequences * queries * keys * width * (0.5 if causal else 1.0) * (2.5 if backward else 1.0)
    curve, peak, element = _attention_rate(chip, precision)
    rate = peak * curve.attainable * chip.sustained * efficiency * (curve.backward if backward else 1.0)
    # One sequence's work is cut into blocks whose first and last are half empty.
    seconds = flops / rate * (1 + curve.fill / keys)
    stored = sequences * (2 * queries * heads + 2 * keys * (heads if kv_heads is None else kv_heads))
    traffic = element * stored * head_dim * (2.0 if backward else 1.0)
    return chip.launch_seconds + max(seconds, _memory_traffic_seconds(chip, traffic))


def _attention_rate(chip: DeviceModel, precision: str) -> tuple[AttentionCurve, float, float]:
    """Return the attention curve, the peak in FLOP/s that it is a share of, and bytes per element."""
    if precision in chip.attention_in:
        return chip.attention_in[precision], chip.peak_flops_per_second[precision], ELEMENT_BYTES[precision]
    peak = chip.peak_flops_per_second.get("bf16", chip.peak_flops_per_second.get("fp16", 0.0))
    if peak <= 0:
        raise ValueError(f"{chip.name} has no 16-bit peak, which attention needs")
    return chip.attention, peak, 2.0


def memory_bound_seconds(chip: DeviceModel, moved_bytes: float, kernels: int = 1) -> float:
    """Return the seconds of `kernels` memory-bound operators that read and write `moved_bytes` together."""
    return kernels * chip.launch_seconds + _memory_traffic_seconds(chip, moved_bytes)


def _memory_traffic_seconds(chip: DeviceModel, moved_bytes: float) -> float:
    """Return the seconds of reading and writing `moved_bytes` at the attained memory rate."""
    return moved_bytes / (chip.bandwidth_bytes_per_second * chip.bandwidth_share)
