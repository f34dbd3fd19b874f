"""Meter of the machine that reads nothing."""

from __future__ import annotations

from wanma.bench.measurements.measurement import MachineUsage, Utilization


class NoMeter:
    """Meter that reads nothing."""

    def __enter__(self) -> NoMeter:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def usage(self) -> MachineUsage:
        return MachineUsage()

    def utilization(self, _start: float, _end: float) -> Utilization:
        return Utilization()
