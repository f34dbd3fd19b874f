"""The GPU sampler, against a stand-in for NVML: these machines have no driver."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from wanma.job.errors import WanmaError
from wanma.observe.metrics.gpu import GpuReading, GpuSampler, open_gpu_reader


class NvmlError(Exception):
    pass


def first_sample(sampler: GpuSampler) -> dict[str, float | None]:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        taken = sampler.collect()
        if taken["gpu_utilization"] is not None:
            return taken
        time.sleep(0.005)
    raise AssertionError("no sample within 5 s")


@pytest.mark.parametrize(
    ("uuid", "means"),
    [
        ("1234", {"gpu_utilization": 0.75, "gpu_power_watts": 350.0}),
        ("GPU-no-power", {"gpu_utilization": 0.75, "gpu_power_watts": None}),
    ],
)
def test_means_of_what_a_gpu_reports_are_handed_over_once(
    monkeypatch: pytest.MonkeyPatch, uuid: str, means: dict[str, float | None]
) -> None:
    nvml: Any = fake_node(2)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    nvml.nvmlDeviceGetHandleByUUID = {"GPU-1234": 0, "GPU-no-power": 0}.__getitem__
    if means["gpu_power_watts"] is None:
        nvml.nvmlDeviceGetPowerUsage = lambda _: nvml.nvmlDeviceGetTemperature(1)
    with closing(GpuSampler(uuid, interval_seconds=0.002)) as sampler:
        assert first_sample(sampler) == means
    sampler._thread.join(60)
    sampler.collect()
    assert sampler.collect() == {"gpu_utilization": None, "gpu_power_watts": None}
    assert nvml.calls == ["init", "shutdown"]


def test_without_the_package_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(WanmaError) as caught:
        GpuSampler("GPU-1")
    assert caught.value.hint == "pip install 'wanma[gpu]'"


def fake_node(count: int) -> types.ModuleType:
    """NVML of a node with so many GPUs; the first is hot, the second at its power cap and else silent."""
    module: Any = types.ModuleType("pynvml")
    calls: list[str] = []
    module.calls = calls
    module.NVMLError = NvmlError
    for constant in (
        "NVML_TEMPERATURE_GPU", "NVML_CLOCK_SM", "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", "NVML_VOLATILE_ECC",
        "nvmlEventTypeXidCriticalError",
    ):  # fmt: skip
        setattr(module, constant, 0)
    module.nvmlInit = lambda: calls.append("init")
    module.nvmlShutdown = lambda: calls.append("shutdown")
    module.nvmlDeviceGetCount = lambda: count
    module.nvmlDeviceGetHandleByIndex = lambda index: index
    module.nvmlDeviceGetCurrentClocksEventReasons = lambda handle: (0x40 | 0x04, 0x04)[handle]

    def of_the_first(value: object) -> Callable[..., object]:
        def read(handle: int, *_: object) -> object:
            if handle:
                raise NvmlError("Not Supported")
            return value

        return read

    module.nvmlDeviceGetUtilizationRates = of_the_first(types.SimpleNamespace(gpu=75))
    module.nvmlDeviceGetTemperature = of_the_first(91)
    module.nvmlDeviceGetMemoryInfo = of_the_first(types.SimpleNamespace(used=3 << 30, total=80 << 30))
    module.nvmlDeviceGetPowerUsage = of_the_first(350_000)
    module.nvmlDeviceGetClockInfo = of_the_first(1980)
    module.nvmlDeviceGetTotalEccErrors = of_the_first(0)
    errors = [types.SimpleNamespace(eventData=13), types.SimpleNamespace(eventData=79)]

    def wait(_events: object, _milliseconds: int) -> object:
        if not errors:
            raise NvmlError("Timeout")
        return errors.pop(0)

    module.nvmlEventSetCreate = lambda: "events"
    module.nvmlEventSetFree = lambda _: None
    module.nvmlDeviceRegisterEvents = of_the_first(None)
    module.nvmlEventSetWait = wait
    return module


def test_all_gpus_of_a_node_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml: Any = fake_node(2)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    reader = open_gpu_reader()
    assert reader is not None
    assert reader.read() == [
        GpuReading(0.75, 91, True, 3 << 30, 80 << 30, 350.0, 1.98e9, 0, 79),
        GpuReading(None, None, False),
    ]
    reader.close()
    assert nvml.calls == ["init", "shutdown"]


def test_a_node_without_gpus_driver_or_package_has_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml: Any = fake_node(0)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert open_gpu_reader() is None
    assert nvml.calls == ["init", "shutdown"]

    def no_driver() -> None:
        raise NvmlError("Driver Not Loaded")

    nvml.nvmlInit = no_driver
    assert open_gpu_reader() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_gpu_reader() is None
