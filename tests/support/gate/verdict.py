"""The verdict on a run, from its records and the repeats of its failures: green or red, and why."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support.gate.records import Record

MOST_FLAKY = 8
"""A run with more flaky tests is red: it says too little."""
MOST_REPEATED = 25
"""With more failures something is broken for all, and none is repeated."""
MOST_LINES = 60
_PURE = ("tests/planner/", "tests/job/", "tests/data/test_order.py", "tests/data/sampling/")
_IMPURE_WORDS = re.compile(
    r"\b(subprocess|multiprocessing|threading|signal|run_job|run_ranks|Desk|sleep|monotonic|perf_counter)\b"
)
_NUMBERS = re.compile(
    r"(losses|norms|curve|bits|bitwise|torch\.equal|assert_close|same_(numbers|tensors|training)|array_equal)"
)


@dataclass(frozen=True)
class Failure:
    """A test that failed in the run, and what became of it alone.

    Attributes:
        why: the reason why it counts as broken; empty: it is flaky.
    """

    record: Record
    why: str = ""


@dataclass(frozen=True)
class Verdict:
    """The end of a run.

    Attributes:
        broken, flaky: failures.
        left_out: tests that were not started as the time was over.
        reasons: what else makes the run red.
    """

    passed: int
    skipped: int
    broken: Sequence[Failure] = ()
    flaky: Sequence[Failure] = ()
    left_out: Sequence[str] = ()
    reasons: Sequence[str] = field(default_factory=list)

    @property
    def is_green(self) -> bool:
        return not self.broken and not self.reasons and len(self.flaky) <= MOST_FLAKY

    def lines(self) -> list[str]:
        """The verdict in at most `MOST_LINES` lines, of which the last one counts."""
        found = [f"RED: {reason}" for reason in self.reasons]
        if len(self.flaky) > MOST_FLAKY:
            found.append(f"RED: more than {MOST_FLAKY} tests are flaky")
        found += [f"BROKEN {_short(one)} ({one.why})" for one in self.broken]
        found += [f"FLAKY {_short(one)} (passed alone)" for one in self.flaky]
        if self.left_out:
            found.append(f"NOT RUN, as the time was over: {len(self.left_out)} tests, by file:")
            found += _by_file(self.left_out)
        if len(found) > MOST_LINES - 2:
            dropped = len(found) - MOST_LINES + 2
            found = [*found[: MOST_LINES - 2], f"... and {dropped} lines more: see the records"]
        names = f": {', '.join(one.record.test for one in self.flaky)}" if self.flaky else ""
        counts = [f"{self.passed:,} passed", f"{len(self.broken)} failed", f"{self.skipped} skipped"]
        return [*found, ", ".join([*counts, f"{len(self.flaky)} flaky{names}"])]


def unwelcome_skips(records: Sequence[Record], allowed: Sequence[str]) -> list[Record]:
    """Return the skips for reasons with none of the words; without words all are welcome.

    pytest says so itself (tests/conftest.py), but in its exit code, which also tells of failures.
    """
    skipped = [one for one in records if one.outcome == "skipped"] if allowed else []
    return [one for one in skipped if not any(word.lower() in one.cause.lower() for word in allowed)]


def reason_against_repeat(record: Record, repository: Path) -> str:
    """Return why chance has no part in a failure of this kind, "" if it may have."""
    file = record.test.partition("::")[0]
    path = repository / file
    if file == record.test or not path.exists():
        return "not a test that ran"
    if file.startswith(_PURE) and not _IMPURE_WORDS.search(path.read_text(encoding="utf-8")):
        return "a pure function"
    if "Tensor-likes are not" in record.text or "Falsifying example" in record.text:
        return "unlike numbers"
    failing = "\n".join(line for line in record.text.splitlines() if line.startswith(">"))
    if record.cause.startswith(("AssertionError", "assert ")) and _NUMBERS.search(failing):
        return "unlike numbers"
    return ""


def _short(failure: Failure) -> str:
    return f"{failure.record.test}: {failure.record.cause}"[:240]


def _by_file(tests: Sequence[str]) -> list[str]:
    counts: dict[str, int] = {}
    for test in tests:
        file = test.partition("::")[0]
        counts[file] = counts.get(file, 0) + 1
    return [f"  {count} of {file}" for file, count in sorted(counts.items())]
