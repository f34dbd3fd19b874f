"""Copies and products beside those of a calibration. No GPU is here: fp8 runs by the CPU's kernel."""

from __future__ import annotations

import pytest
import torch

from wanma.planner.calibration import device_benchmarks
from wanma.planner.calibration.device_benchmarks import copy_cases, fp8_run, matmul_cases

CPU = torch.device("cpu")


def test_a_copy_moves_twice_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_benchmarks, "CPU_COPY_BYTES", 1 << 16)
    ((kind, precision, shape, measure),) = copy_cases(CPU)
    assert (kind, precision, shape) == ("copy", "", (1 << 17,))
    assert measure(0.001) > 0


def test_a_product_in_fp8_has_its_shape_and_dtype() -> None:
    result = fp8_run(CPU, (32, 48, 64))()
    assert isinstance(result, torch.Tensor)
    assert (result.shape, result.dtype) == ((32, 48), torch.bfloat16)


def test_a_cpu_has_no_tf32() -> None:
    assert list(matmul_cases(CPU)) == []


def test_tf32_is_set_for_its_products_alone() -> None:
    seen = []

    def measure(seconds: float) -> float:
        seen.append(torch.backends.cuda.matmul.fp32_precision)
        return seconds

    before = torch.backends.cuda.matmul.fp32_precision
    assert device_benchmarks._in_tf32(measure, 2.0) == 2.0
    assert seen == ["tf32"]
    assert torch.backends.cuda.matmul.fp32_precision == before
