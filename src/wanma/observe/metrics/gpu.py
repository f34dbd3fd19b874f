"""Utilization and power of one GPU, sampled in the background through NVML."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Self

from wanma.job.errors import missing_extra_error

SAMPLE_INTERVAL_SECONDS = 1.0
WATTS_PER_MILLIWATT = 1e-3


class GpuSampler:
    """Sampler of means between two calls of `collect`; only for ranks on a GPU.

        with GpuSampler(str(torch.cuda.get_device_properties(0).uuid)) as gpu:
            record |= gpu.take()    # {"gpu_utilization": 0.97, "gpu_power_watts": 640.0}

    Args:
        uuid: UUID of the GPU, with or without the leading 'GPU-'.
        interval_seconds: sampling interval.

    Raises:
        WanmaError: the package `nvidia-ml-py` is not installed.
    """

    def __init__(self, uuid: str, interval_seconds: float = SAMPLE_INTERVAL_SECONDS) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise missing_extra_error("nvidia-ml-py", "gpu", "reading GPU utilization and power") from error
        self.failure_reason = ""
        """Reason why sampling stopped, such as a GPU that does not report its power; empty while it runs."""
        self._nvml: Any = pynvml
        self._uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        self._interval_seconds = interval_seconds
        self._lock = threading.Lock()
        self._samples: list[tuple[float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="gpu-sampler", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(5 * self._interval_seconds)

    def collect(self) -> dict[str, float | None]:
        """Return the means since the last call: `gpu_utilization` (0 .. 1) and `gpu_power_watts`.

        They are None if no sample was taken: less than the sampling interval passed, or see `problem`.
        """
        with self._lock:
            samples, self._samples = self._samples, []
        if not samples:
            return {"gpu_utilization": None, "gpu_power_watts": None}
        utilization, power = (sum(column) / len(samples) for column in zip(*samples, strict=True))
        return {"gpu_utilization": utilization, "gpu_power_watts": power}

    def _sample(self) -> None:
        """Sample until the sampler is closed, or until the first error of the driver; body of the thread."""
        nvml = self._nvml
        try:
            nvml.nvmlInit()
            try:
                handle = nvml.nvmlDeviceGetHandleByUUID(self._uuid)
                while not self._stop.wait(self._interval_seconds):
                    utilization = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
                    power = nvml.nvmlDeviceGetPowerUsage(handle) * WATTS_PER_MILLIWATT
                    with self._lock:
                        self._samples.append((utilization, power))
            finally:
                nvml.nvmlShutdown()
        except nvml.NVMLError as error:
            self.failure_reason = f"GPU utilization and power are no longer recorded: {error}"
