"""Rules by which the state of the machine disturbs a measurement, so that it does not count."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from wanma.bench.measurements.measurement import MachineUsage


@dataclass(frozen=True)
class DisturbanceLimits:
    """Limits within which a measurement counts."""

    foreign_cpu: float = 0.1
    """Mean CPUs of programs outside the measurement."""
    clock_share: float = 0.95
    """Smallest mean CPU clock, as a share of the highest of all measurements."""
    clock_step_seconds: float = 0.05
    """Jump of the wall clock, by which step times would be wrong."""


NO_LIMITS = DisturbanceLimits(foreign_cpu=1e9, clock_share=0.0, clock_step_seconds=1e9)
"""Limits of a smoke test, which measures nothing, and of executions that several nodes count on."""


class DisturbanceRule:
    """Rule for measurements that follow each other: the clock of each is compared with the highest so far."""

    def __init__(self, limits: DisturbanceLimits, earlier: Iterable[MachineUsage] = ()) -> None:
        self._limits = limits
        self._clocks = [usage.clock_hertz[1] for usage in earlier if usage.clock_hertz is not None]

    def __call__(self, usage: MachineUsage) -> tuple[str, ...]:
        """Return the reasons why the next measurement does not count; what could not be read, is none."""
        limits = self._limits
        reasons: list[str] = []
        if usage.foreign_cpu is not None and usage.foreign_cpu > limits.foreign_cpu:
            reasons.append(
                f"Other programs used {usage.foreign_cpu:.2f} CPUs; the limit is {limits.foreign_cpu:g}."
            )
        if usage.clock_hertz is not None and usage.clock_hertz[1] > 0:
            self._clocks.append(usage.clock_hertz[1])
            share = usage.clock_hertz[1] / max(self._clocks)
            if share < limits.clock_share:
                reasons.append(
                    f"The CPU clock was {usage.clock_hertz[1] / 1e9:.2f} GHz, {share:.0%} of the highest "
                    f"seen; the limit is {limits.clock_share:.0%}."
                )
        if usage.is_throttled:
            heat = "" if usage.max_celsius is None else f" at up to {usage.max_celsius:.0f} °C"
            reasons.append(f"A CPU or GPU reduced its clock because of heat or power{heat}.")
        if usage.clock_step_seconds > limits.clock_step_seconds:
            reasons.append(
                f"The wall clock jumped by {usage.clock_step_seconds:.2f} s; "
                f"the limit is {limits.clock_step_seconds:g} s."
            )
        return tuple(reasons)
