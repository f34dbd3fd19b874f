"""Efficiency curves by device generation: shares of the peak that operators attain, each with its source.

Fitted by `benchmarks/planner/fit.py` to latencies of single operators measured by ai-dynamo/aiconfigurator
(Apache-2.0, August 2026) on A100, H100, H200, B200, GB200 and L40S. An unmeasured device takes the curves of
its generation, or of the one nearest to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from wanma.planner.hardware_model.model import AttentionCurve, MatmulCurve


class EfficiencyCurves(NamedTuple):
    """Efficiency curves of one device generation, for matrix products and fused attention."""

    matmul_curves: Mapping[str, MatmulCurve]
    attention_curve: AttentionCurve
    attention_curves_by_precision: Mapping[str, AttentionCurve]
    """Attention curves in 32 and 64 bits."""


def _curves(
    products: dict[str, tuple[float, float]], attention: tuple[float, float, float]
) -> EfficiencyCurves:
    by_precision = {
        name: MatmulCurve(*numbers) for name, numbers in {**_DEFAULT_MATMUL_SHARES, **products}.items()
    }
    full_precision = dict.fromkeys(("fp32", "fp64"), AttentionCurve(*_DEFAULT_ATTENTION_SHARES))
    return EfficiencyCurves(
        MappingProxyType(by_precision), AttentionCurve(*attention), MappingProxyType(full_precision)
    )


# Products of 32 and 64 bits are unmeasured. Ordinary cores are filled by small tiles and come close to their
# peak; a tile begins and ends in the time that it takes in 16 bits, in which they compute fewer terms, as
# their rate is an eighth (Volta) or less; TF32's is half. Attention in those precisions is the
# memory-efficient kernel, taken at half of their products' rate.
_DEFAULT_MATMUL_SHARES = {"fp64": (0.9, 16), "fp32": (0.9, 16), "tf32": (0.9, 64)}
_DEFAULT_ATTENTION_SHARES = (0.45, 600, 0.9)


GENERATION_CURVES: Mapping[str, EfficiencyCurves] = MappingProxyType(
    {
        # No measurements: tensor cores of the first two generations (Turing's are the second), whose fp16
        # products attain about 0.85 (Jia et al. 2018, section 4.3); no fused attention was written for them.
        "volta": _curves({"fp16": (0.85, 128)}, (0.3, 600, 0.9)),
        "ampere": _curves({"bf16": (0.9, 128), "fp16": (0.9, 128)}, (0.49, 600, 0.9)),
        "ada": _curves({"bf16": (0.7, 0), "fp16": (0.7, 0), "fp8": (0.56, 0)}, (0.44, 700, 0.9)),
        # No measurements: Ada at half its rate, as it accumulates in 32 bits, is bound as Ampere is.
        "ada geforce": _curves({"bf16": (0.9, 128), "fp16": (0.9, 128), "fp8": (0.8, 256)}, (0.49, 600, 0.9)),
        "hopper": _curves(
            {"bf16": (0.82, 96), "fp16": (0.82, 96), "fp8": (0.82, 640)},
            (0.56, 1250, 0.9),
        ),
        "blackwell": _curves(
            {"bf16": (0.74, 32), "fp16": (0.74, 32), "fp8": (0.76, 768), "nvfp4": (0.58, 1024)},
            (0.56, 2400, 0.9),
        ),
        # No measurements here: large products reach 620 TFLOP/s in bf16 and 990 in fp8 (SemiAnalysis,
        # December 2024, recalled); fused attention is behind as it is on Hopper.
        "cdna 3": _curves({"bf16": (0.47, 96), "fp16": (0.47, 96), "fp8": (0.38, 640)}, (0.32, 1250, 0.9)),
        # No measurements: arrays of 128 × 128 stream whole rows; attention is taken to be as on an A100.
        "tpu": _curves({"bf16": (0.9, 128)}, (0.49, 600, 0.9)),
    }
)

CPU_CURVES = _curves({"bf16": (0.6, 64), "fp16": (0.6, 64)}, (0.3, 200, 0.6))
"""Curves of any CPU until it is calibrated: shares, for oneDNN's products, of the peak that `wanma doctor`
measures or that follows from instruction rates."""
