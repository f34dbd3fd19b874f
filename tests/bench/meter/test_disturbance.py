"""Rules by which the machine disturbs a measurement."""

from __future__ import annotations

import pytest

from wanma.bench.measurements.measurement import MachineUsage
from wanma.bench.meter.disturbance import DisturbanceLimits, DisturbanceRule

EARLIER = [MachineUsage(clock_hertz=(1e9, 2.6e9))]


def reasons(usage: MachineUsage, **limits: float) -> tuple[str, ...]:
    return DisturbanceRule(DisturbanceLimits(**limits), EARLIER)(usage)


def test_a_quiet_machine_gives_no_reason() -> None:
    usage = MachineUsage(
        foreign_cpu=0.1,
        clock_hertz=(0.8e9, 2.5e9),
        max_celsius=92.0,
        is_throttled=False,
        clock_step_seconds=0.05,
    )
    assert reasons(usage) == ()
    assert reasons(MachineUsage()) == (), "what cannot be read"


@pytest.mark.parametrize(
    ("usage", "reason"),
    [
        (MachineUsage(foreign_cpu=0.32), "Other programs used 0.32 CPUs; the limit is 0.1."),
        (
            MachineUsage(clock_hertz=(1.0e9, 2.1e9)),
            "The CPU clock was 2.10 GHz, 81% of the highest seen; the limit is 95%.",
        ),
        (
            MachineUsage(is_throttled=True, max_celsius=99.6),
            "A CPU or GPU reduced its clock because of heat or power at up to 100 °C.",
        ),
        (MachineUsage(is_throttled=True), "A CPU or GPU reduced its clock because of heat or power."),
        (
            MachineUsage(clock_step_seconds=2.5),
            "The wall clock jumped by 2.50 s; the limit is 0.05 s.",
        ),
    ],
)
def test_each_disturbance_is_one_sentence_with_its_number(usage: MachineUsage, reason: str) -> None:
    assert reasons(usage) == (reason,)


def test_a_machine_can_have_all_of_them_and_limits_can_be_wider() -> None:
    usage = MachineUsage(foreign_cpu=0.5, clock_hertz=(1e9, 2e9), is_throttled=True, clock_step_seconds=0.2)
    assert len(reasons(usage)) == 4
    (left,) = reasons(usage, foreign_cpu=1, clock_share=0.5, clock_step_seconds=1)
    assert "heat" in left


def test_a_clock_is_compared_with_the_highest_so_far() -> None:
    fast, slow = (MachineUsage(clock_hertz=(1e9, hertz)) for hertz in (2.6e9, 2.4e9))
    rule = DisturbanceRule(DisturbanceLimits(), [MachineUsage()])
    assert rule(slow) == (), "nothing to compare with"
    assert rule(fast) == ()
    assert [len(rule(usage)) for usage in (slow, fast, MachineUsage())] == [1, 0, 0]
    (reason,) = DisturbanceRule(DisturbanceLimits(clock_share=0.95), [fast])(slow)
    assert "92% of the highest" in reason
