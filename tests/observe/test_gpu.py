"""The GPU sampler, against a stand-in for NVML: these machines have no driver."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable
from typing import Any

import pytest

from wanma.job.errors import WanmaError
from wanma.observe.metrics.gpu import GpuSampler


class NvmlError(Exception):
    pass


def fake_nvml(power: Callable[[str], float]) -> types.ModuleType:
    module: Any = types.ModuleType("pynvml")
    module.NVMLError = NvmlError
    module.nvmlInit = module.nvmlShutdown = lambda: None
    module.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    module.nvmlDeviceGetUtilizationRates = lambda _: types.SimpleNamespace(gpu=90)
    module.nvmlDeviceGetPowerUsage = power
    return module


def first_sample(sampler: GpuSampler) -> dict[str, float | None]:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        taken = sampler.collect()
        if taken["gpu_utilization"] is not None:
            return taken
        time.sleep(0.005)
    raise AssertionError("no sample within 5 s")


def test_means_are_handed_over_once(monkeypatch: pytest.MonkeyPatch) -> None:
    handles: list[str] = []

    def power(handle: str) -> float:
        handles.append(handle)
        return 640_000

    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(power))
    with GpuSampler("1234", interval_seconds=0.002) as sampler:
        assert first_sample(sampler) == {"gpu_utilization": 0.9, "gpu_power_watts": 640.0}
    sampler.collect()
    assert sampler.collect() == {"gpu_utilization": None, "gpu_power_watts": None}
    assert set(handles) == {"GPU-1234"}
    assert sampler.failure_reason == ""


def test_a_gpu_that_reports_nothing_ends_the_sampling_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(handle: str) -> float:
        raise NvmlError("Not Supported")

    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(refuse))
    with GpuSampler("GPU-1", interval_seconds=0.002) as sampler:
        sampler._thread.join(5)
        assert sampler.failure_reason == "GPU utilization and power are no longer recorded: Not Supported"
        assert sampler.collect()["gpu_power_watts"] is None


def test_without_the_package_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(WanmaError) as caught:
        GpuSampler("GPU-1")
    assert caught.value.hint == "pip install 'wanma[gpu]'"
