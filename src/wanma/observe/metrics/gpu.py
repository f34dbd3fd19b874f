"""State of GPUs through NVML: a reader of the GPUs of the node, and a background sampler of one of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from wanma.job.errors import missing_extra_error

SAMPLE_INTERVAL_SECONDS = 1.0
THROTTLE_REASONS = 0x08 | 0x20 | 0x40 | 0x80
"""Bits of NVML's clock event reasons that are faults: hardware slowdown, heat by software and by hardware,
power brake. The software power cap (0x04) is not among them: a GPU at full load runs at it all the time."""


@dataclass(frozen=True)
class GpuReading:
    """State of one GPU at one time. None: it does not report this."""

    utilization: float | None
    """Share of the last sampling period of the driver in which a kernel ran, 0 to 1."""
    celsius: float | None
    is_throttled: bool | None
    """True if its clock is reduced because of heat or a fault of its power supply."""
    memory_bytes: float | None = None
    """Memory in use, of all programs."""
    total_memory_bytes: float | None = None
    power_watts: float | None = None
    clock_hertz: float | None = None
    """Clock of the multiprocessors."""
    ecc_errors: int | None = None
    """Memory errors since the driver's start that could not be corrected."""
    xid: int | None = None
    """XID number of the newest error that the driver has reported since the reader was opened; 0: none."""


class GpuReader:
    """Reader of GPUs of this node, also of those that others use.

    Args:
        nvml: module `pynvml`.
        uuid: UUID of the one to read; None: all.

    Raises:
        NVMLError: there is no driver.
    """

    def __init__(self, nvml: Any, uuid: str | None = None) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        if uuid is not None:
            self.handles = [nvml.nvmlDeviceGetHandleByUUID(uuid)]
        else:
            numbers = range(nvml.nvmlDeviceGetCount())
            self.handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in numbers]
        self._events = [self._value(self._open_events, handle) for handle in self.handles]
        """Set of events of each GPU; None: it does not report errors."""
        self._xids = [None if events is None else 0 for events in self._events]

    def read(self) -> list[GpuReading]:
        """Return the state of each GPU."""
        nvml = self._nvml
        readings = []
        for index, handle in enumerate(self.handles):
            self._read_xid(index)
            rates = self._value(nvml.nvmlDeviceGetUtilizationRates, handle)
            reasons = self._value(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
            memory = self._value(nvml.nvmlDeviceGetMemoryInfo, handle)
            milliwatts = self._value(nvml.nvmlDeviceGetPowerUsage, handle)
            megahertz = self._value(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
            errors = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
            readings.append(
                GpuReading(
                    utilization=None if rates is None else rates.gpu / 100,
                    celsius=self._value(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
                    is_throttled=None if reasons is None else bool(reasons & THROTTLE_REASONS),
                    memory_bytes=None if memory is None else float(memory.used),
                    total_memory_bytes=None if memory is None else float(memory.total),
                    power_watts=None if milliwatts is None else milliwatts / 1e3,
                    clock_hertz=None if megahertz is None else megahertz * 1e6,
                    ecc_errors=self._value(nvml.nvmlDeviceGetTotalEccErrors, handle, *errors),
                    xid=self._xids[index],
                )
            )
        return readings

    def close(self) -> None:
        """Give the driver back."""
        for events in self._events:
            if events is not None:
                self._value(self._nvml.nvmlEventSetFree, events)
        self._nvml.nvmlShutdown()

    def _open_events(self, handle: Any) -> Any:
        events = self._nvml.nvmlEventSetCreate()
        try:
            self._nvml.nvmlDeviceRegisterEvents(handle, self._nvml.nvmlEventTypeXidCriticalError, events)
        except self._nvml.NVMLError:
            self._nvml.nvmlEventSetFree(events)
            raise
        return events

    def _read_xid(self, index: int) -> None:
        """Take the errors that the driver has reported since the last call, without a wait."""
        if (events := self._events[index]) is not None:
            while (event := self._value(self._nvml.nvmlEventSetWait, events, 0)) is not None:
                self._xids[index] = int(event.eventData)

    def _value(self, read: Callable[..., Any], *arguments: object) -> Any:
        try:
            return read(*arguments)
        except self._nvml.NVMLError:
            return None


def open_gpu_reader(uuid: str | None = None) -> GpuReader | None:
    """Return a reader of this node's GPUs, or of one; None without `nvidia-ml-py`, a driver or a GPU."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        reader = GpuReader(pynvml, uuid)
    except pynvml.NVMLError:
        return None
    if not reader.handles:
        reader.close()
        return None
    return reader


class GpuSampler:
    """Sampler, until it is closed, of means between two calls of `collect`; only for ranks on a GPU.

        gpu = GpuSampler(str(torch.cuda.get_device_properties(0).uuid))
        record |= gpu.collect()    # {"gpu_utilization": 0.97, "gpu_power_watts": 640.0}

    Args:
        uuid: UUID of the GPU, with or without the leading 'GPU-'.

    Raises:
        WanmaError: the package `nvidia-ml-py` is not installed.
    """

    def __init__(self, uuid: str, interval_seconds: float = SAMPLE_INTERVAL_SECONDS) -> None:
        try:
            import pynvml  # noqa: F401
        except ImportError as error:
            raise missing_extra_error("nvidia-ml-py", "gpu", "reading GPU utilization and power") from error
        self._uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        self._interval_seconds = interval_seconds
        self._lock = threading.Lock()
        self._readings: list[GpuReading] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="gpu-sampler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5 * self._interval_seconds)

    def collect(self) -> dict[str, float | None]:
        """Return the means since the last call: `gpu_utilization` (0 .. 1) and `gpu_power_watts`.

        None: less than the sampling interval passed, or the GPU does not report this.
        """
        with self._lock:
            readings, self._readings = self._readings, []
        return {
            "gpu_utilization": _mean(reading.utilization for reading in readings),
            "gpu_power_watts": _mean(reading.power_watts for reading in readings),
        }

    def _sample(self) -> None:
        """Sample until the sampler is closed; body of the thread."""
        reader = open_gpu_reader(self._uuid)
        if reader is None:
            return
        while not self._stop.wait(self._interval_seconds):
            readings = reader.read()
            with self._lock:
                self._readings += readings
        reader.close()


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are known; None: none is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
