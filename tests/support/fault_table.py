"""Rows of the fault table in docs/results/recovery-faults.md, one for each fault that a test has injected.

A test records its row (fixture `note` of tests/faults) after its last assertion. `python
benchmarks/recovery/matrix.py` runs the tests and collects the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

PROPERTY = "fault"


@dataclass(frozen=True)
class Row:
    """One fault, and the cost of its recovery."""

    fault: str
    plan: str
    restored: str
    """Source of the restored state: memory, partner, checkpoint, beginning; '' if no recovery was needed."""
    repeated_steps: int
    seconds: float | None
    """Seconds from the fault to the end of the first step after it; None if no recovery was needed, or if the
    run ended and the same command resumed it."""
    weights: str = "same bits"
    """Final weights, compared with those of an undisturbed run."""
