"""The table of faults in docs/concepts/recovery.md: a row per fault that a test has met.

A test notes its row (fixture `note` of tests/faults) after all that it asserts. `python
benchmarks/recovery/matrix.py` runs the tests and collects the rows; it reads nothing but these.
"""

from __future__ import annotations

from dataclasses import dataclass

PROPERTY = "fault"


@dataclass(frozen=True)
class Row:
    """One fault, and how the run got over it."""

    fault: str
    plan: str
    restored: str
    """From where: memory, partner, checkpoint, beginning; '' where nobody had to go back."""
    repeated_steps: int
    seconds: float | None
    """From the fault to the end of the first step after it; None where nobody had to go back, or where the
    run gave up and the same command went on."""
    weights: str = "same bits"
    """The final ones beside those of the run that nothing happens to."""
