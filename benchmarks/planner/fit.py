"""Fit of `wanma.planner.hardware_model.efficiency_curves` to measured latencies of single operators.

It needs pyarrow. The measurements (ai-dynamo/aiconfigurator, Apache-2.0) are not copied; the printed values
are entered into the source by hand.

    python -m benchmarks.planner.fit --tables ../shared/tables
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.planner.machines import machine
from wanma.planner.hardware_model.model import TILES, DeviceModel
from wanma.planner.hardware_model.operator_time import ELEMENT_BYTES

Array = npt.NDArray[np.float64]

FILES = {
    "A100 SXM 80 GB": "a100_sxm",
    "H100 SXM": "h100_sxm",
    "H200 SXM": "h200_sxm",
    "B200": "b200_sxm",
    "GB200": "gb200",
    "L40S": "l40s",
}
PRECISIONS = {"bfloat16": "bf16", "fp8": "fp8", "nvfp4": "nvfp4"}
LEAST = (2048, 1024, 1024)
"""Minimum sides (m, n, k) of a product that counts: training computes no smaller ones."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=Path, default=Path("../shared/tables"))
    tables = parser.parse_args().tables / "devices"
    for name, stem in FILES.items():
        chip = machine(name, 8).chip
        for precision, (attainable, fill, cast, error, bias, count) in _products(tables, stem, chip):
            print(
                f"{name} {precision}: attainable {attainable:.2f}, fill {fill:.0f}, cast {cast:.0f} bytes; "
                f"{count} products, mean |log error| {error:.3f}, bias {bias:+.3f}",
                flush=True,
            )
        attainable, fill, error = _attention(tables, stem, chip)
        print(f"{name} attention: attainable {attainable:.2f}, fill {fill:.0f}; |log error| {error:.3f}")
        start, latency, rate, ramp, error = _collectives(tables, stem)
        print(
            f"{name} collectives: {start * 1e6:.0f} µs and {latency * 1e6:.2f} µs a step, "
            f"{rate / 1e9:.0f} GB/s, ramp {ramp / 1e6:.0f} MB; |log error| {error:.3f}",
            flush=True,
        )


def _products(
    tables: Path, stem: str, chip: DeviceModel
) -> Iterator[tuple[str, tuple[float, float, float, float, float, int]]]:
    """Yield attainable share, fill, and bytes of casting per element of the input.

    The measured calls include casting below 16 bits: rates there grow with n much more than with m or k.
    """
    table = _columns(tables / f"{stem}_gemm_perf.parquet", ["gemm_dtype", "m", "n", "k", "latency"])
    m, n, k, latency = (np.asarray(table[name], dtype=float) for name in ("m", "n", "k", "latency"))
    kinds = np.asarray(table["gemm_dtype"])
    for kind, precision in PRECISIONS.items():
        chosen = (kinds == kind) & (m >= LEAST[0]) & (n >= LEAST[1]) & (k >= LEAST[2])
        if not chosen.any() or precision not in chip.peak_flops_per_second:
            continue
        sides = (m[chosen], n[chosen], k[chosen])
        measured = latency[chosen] / 1e3
        moved = _moved_seconds(chip, precision, *sides)
        element = sides[0] * sides[2] / (chip.bandwidth_bytes_per_second * chip.bandwidth_share)
        casts = [0.0] if ELEMENT_BYTES[precision] >= 2 else np.arange(2.0, 21.0, 2.0)
        best: tuple[float, float, float, float, float] = (np.inf, 0.0, 0.0, 0.0, 0.0)
        for fill in (0, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024):
            waves = _wave_seconds(chip, precision, *sides, fill)
            for share, cast in itertools.product(np.arange(0.3, 1.01, 0.02), casts):
                seconds = chip.launch_seconds + np.maximum(waves / share, moved) + cast * element
                errors = np.log(seconds / measured)
                best = min(
                    best, (float(np.abs(errors).mean()), float(share), fill, cast, float(errors.mean()))
                )
        error, attainable, filled, casting, bias = best
        yield precision, (attainable, filled, casting, error, bias, int(chosen.sum()))


def _wave_seconds(chip: DeviceModel, precision: str, m: Array, n: Array, k: Array, fill: float) -> Array:
    """Return `operator_time.matmul_seconds` for many products at once, at the full peak."""
    peak = chip.peak_flops_per_second[precision]
    seconds = np.full(m.shape, np.inf)
    for rows, columns, share in TILES:
        waves = np.ceil(np.ceil(m / rows) * np.ceil(n / columns) / chip.multiprocessors)
        flops = waves * 2.0 * rows * columns * (k + fill) * chip.multiprocessors
        seconds = np.minimum(seconds, flops / (peak * share))
    return seconds


def _moved_seconds(chip: DeviceModel, precision: str, m: Array, n: Array, k: Array) -> Array:
    element = ELEMENT_BYTES[precision]
    moved = element * (m * k + k * n) + max(element, 2.0) * m * n
    return moved / (chip.bandwidth_bytes_per_second * chip.bandwidth_share)


def _attention(tables: Path, stem: str, chip: DeviceModel) -> tuple[float, float, float]:
    """Return the fit for causal prefill in 16 bits with heads 128 wide, enough of them to fill the device."""
    names = ["batch_size", "isl", "num_heads", "head_dim", "attn_dtype", "kv_cache_dtype", "window_size"]
    table = _columns(tables / f"{stem}_context_attention_perf.parquet", [*names, "latency"])
    batch, length, heads = (np.asarray(table[name], dtype=float) for name in names[:3])
    chosen = (
        (np.asarray(table["head_dim"], dtype=int) == 128)
        & (np.asarray(table["attn_dtype"]) == "bfloat16")
        & (np.asarray(table["kv_cache_dtype"]) == "bfloat16")
        & (np.asarray(table["window_size"], dtype=int) == 0)
        & (length >= 512)
        & (batch * heads >= 64)
    )
    measured = np.asarray(table["latency"], dtype=float)[chosen] / 1e3
    length = length[chosen]
    flops = 2.0 * (batch * heads)[chosen] * length * length * 128
    best = (np.inf, 0.0, 0.0)
    for attainable, fill in itertools.product(np.arange(0.2, 0.9, 0.01), range(0, 4000, 100)):
        rate = chip.peak_flops_per_second["bf16"] * attainable / (1 + fill / length)
        error = float(np.abs(np.log((flops / rate + chip.launch_seconds) / measured)).mean())
        best = min(best, (error, float(attainable), float(fill)))
    return best[1], best[2], best[0]


def _collectives(tables: Path, stem: str) -> tuple[float, float, float, float, float]:
    """Return start, latency of one step, rate of one direction within a node, and ramp (see `LinkLevel`).

    They are those of gathers and scatters; messages weigh equally. All-reduce is left out: some switches add
    up on the way.
    """
    table = _columns(
        tables / f"{stem}_nccl_perf.parquet", ["op_name", "nccl_dtype", "num_gpus", "message_size", "latency"]
    )
    chosen = (np.asarray(table["nccl_dtype"]) == "half") & np.isin(
        np.asarray(table["op_name"]), ("all_gather", "reduce_scatter")
    )
    group = np.asarray(table["num_gpus"], dtype=float)[chosen]
    # The whole buffer in elements of 16 bits, as the rates between 2, 4 and 8 devices show.
    whole = np.asarray(table["message_size"], dtype=float)[chosen] * 2
    measured = np.asarray(table["latency"], dtype=float)[chosen] / 1e3
    moved = whole * (group - 1) / group
    best = (np.inf, 0.0, 0.0, 0.0, 0.0)
    for ramp, start, latency in itertools.product(
        (0.0, 1e6, 2e6, 5e6, 10e6, 20e6), np.arange(2e-6, 11e-6, 1e-6), np.arange(0.5e-6, 2.1e-6, 0.25e-6)
    ):
        slowed = moved * (1 + np.sqrt(ramp / whole))
        for rate in np.geomspace(1e9, 1e12, 100):
            seconds = start + latency * (group - 1) + slowed / rate
            error = float(np.abs(np.log(seconds / measured)).mean())
            best = min(best, (error, float(start), float(latency), float(rate), ramp))
    return best[1], best[2], best[3], best[4], best[0]


def _columns(path: Path, names: list[str]) -> dict[str, list[object]]:
    import pyarrow.parquet as parquet

    found: dict[str, list[object]] = parquet.read_table(path, columns=names).to_pydict()
    return found


if __name__ == "__main__":
    main()
