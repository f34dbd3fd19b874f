"""Published scaling curves: their speedups and efficiencies, recomputed from their throughputs."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from support.scaling_results import record, result
from wanma.bench.figures.scaling import find_scalings


class Curve(NamedTuple):
    """Published throughputs by devices, and the speedups that their authors give, rounded."""

    source: str
    kind: str
    throughputs: dict[int, float]
    """Samples, or tokens, per second."""
    speedups: dict[int, float]
    digits: int
    """Decimals of the published speedups."""


DLPERF = "Oneflow-Inc/DLPerf, PyTorch/resnet50v1.5: ResNet-50 on 4 × 8 V100, 128 images per GPU"
CURVES = {
    "DLPerf, 8 loader processes": Curve(
        DLPERF, "weak",
        {1: 306.35, 4: 1079.19, 8: 1070.37, 16: 2093.53, 32: 4119.84},
        {1: 1.0, 4: 3.52, 8: 3.49, 16: 6.83, 32: 13.45}, 2,
    ),
    "DLPerf, 48 loader processes": Curve(
        DLPERF, "weak",
        {1: 348.62, 4: 1226.38, 8: 2632.93, 16: 5115.4, 32: 10021.29},
        {1: 1.0, 4: 3.52, 8: 7.55, 16: 14.67, 32: 28.75}, 2,
    ),
    "DLPerf, 8 loader processes of DALI": Curve(
        DLPERF, "weak",
        {1: 354.44, 4: 1367.67, 8: 2244.24, 16: 4372.33, 32: 8816.7},
        {1: 1.0, 4: 3.86, 8: 6.33, 16: 12.34, 32: 24.88}, 2,
    ),
    "DLPerf, 48 loader processes of DALI": Curve(
        DLPERF, "weak",
        {1: 350.66, 4: 1306.49, 8: 2707.42, 16: 5193.09, 32: 10032.72},
        {1: 1.0, 4: 3.73, 8: 7.72, 16: 14.81, 32: 28.61}, 2,
    ),
    "torchgpipe": Curve(
        "torchgpipe 0.0.3, docs/benchmarks: ResNet-101 on P40, naive-1 and pipeline-2, -4, -8", "strong",
        {1: 92.539, 2: 137.788, 4: 243.322, 8: 404.084},
        {1: 1.0, 2: 1.489, 4: 2.629, 8: 4.367}, 3,
    ),
    "TensorFlow on a DGX-1": Curve(
        "tensorflow.org/performance/benchmarks, 2017: Inception V3 on P100, 64 images per GPU", "weak",
        {1: 142.0, 2: 284.0, 4: 596.0, 8: 1131.0},
        {1: 1.0, 2: 2.0, 4: 4.20, 8: 7.96}, 2,
    ),
}  # fmt: skip

WEAK_13B = {8: (38336, 39.79), 16: (76280, 39.58), 32: (153960, 39.95), 64: (307209, 39.86)}
"""MPT-13B on H100 with 2 sequences of 2,048 tokens per GPU: (tokens per second, MFU in %) by GPUs, of
mosaicml/llm-foundry, scripts/train/benchmarking/README.md."""


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES.keys())
def test_the_speedups_of_the_authors_are_recomputed(curve: Curve) -> None:
    batch = {ranks: 128 * ranks if curve.kind == "weak" else 1024 for ranks in curve.throughputs}
    records = [record(ranks, batch[ranks]) for ranks in curve.throughputs]
    (scaling,) = find_scalings(result(records, list(curve.throughputs.values())))
    assert scaling.kind == curve.kind
    rounding = 10**-curve.digits
    for row in scaling.rows:
        # One is cut off and not rounded: 7.965 of the DGX-1 is published as 7.96.
        assert row.speedup.median == pytest.approx(curve.speedups[row.ranks], abs=rounding)
        assert row.efficiency == pytest.approx(
            curve.speedups[row.ranks] / row.ranks, abs=rounding / row.ranks
        )
        assert row.ideal == row.ranks


def test_published_efficiencies_of_a_server_are_recomputed() -> None:
    """100 %, 100 %, 104.93 % and 99.56 % on 1, 2, 4 and 8 P100."""
    curve = CURVES["TensorFlow on a DGX-1"]
    records = [record(ranks, 64 * ranks) for ranks in curve.throughputs]
    (scaling,) = find_scalings(result(records, list(curve.throughputs.values())))
    efficiencies = [row.efficiency for row in scaling.rows]
    assert efficiencies == pytest.approx([1.0, 1.0, 1.0493, 0.9956], abs=5e-5)


def test_weak_scaling_efficiency_is_the_quotient_of_published_utilizations() -> None:
    records = [record(ranks, 2 * ranks) for ranks in WEAK_13B]
    (scaling,) = find_scalings(result(records, [float(rate) for rate, _ in WEAK_13B.values()]))
    assert scaling.kind == "weak"
    for row in scaling.rows:
        ratio = WEAK_13B[row.ranks][1] / WEAK_13B[8][1]
        assert row.efficiency == pytest.approx(ratio, abs=2e-4)


def test_two_pods_of_palm_have_the_published_efficiency() -> None:
    """Twice 3,072 TPU v4: 1.95 times the throughput, "about 97 %" (Chowdhery et al. 2022, section 4)."""
    (scaling,) = find_scalings(result([record(3072, 1024), record(6144, 2048)], [1.0, 1.95]))
    assert scaling.kind == "weak"
    assert scaling.rows[1].efficiency == pytest.approx(0.975)


def test_efficiency_over_servers_and_over_devices_differ() -> None:
    """DLPerf with 8 loader processes: 96 % over 4 servers, and 42 % over 32 GPUs, of the same run."""
    rates = CURVES["DLPerf, 8 loader processes"].throughputs
    (over_servers,) = find_scalings(result([record(8, 1024), record(32, 4096)], [rates[8], rates[32]]))
    (over_devices,) = find_scalings(result([record(1, 128), record(32, 4096)], [rates[1], rates[32]]))
    assert over_servers.rows[1].efficiency == pytest.approx(0.962, abs=5e-4)
    assert over_devices.rows[1].efficiency == pytest.approx(0.420, abs=5e-4)
