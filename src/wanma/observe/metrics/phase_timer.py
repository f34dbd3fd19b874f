"""Timer of the phases of a step: wall-clock seconds by phase."""

from __future__ import annotations

import time
from types import TracebackType

PHASES = ("data", "forward_backward", "communication", "optimizer", "checkpoint", "host", "validation")
"""Phases of a step record; `communication` is its exposed part, not the overlapped one. `host` is the Python
of the training loop outside the others: records, reports to the supervisor, hooks."""


class PhaseTimer:
    """Timer that adds up seconds by phase; `collect` returns them and starts anew.

        with timer.phase("forward_backward"):
            ...
            with timer.phase("communication"):  # counted here, and no longer as forward_backward
                ...
        record["phases"] = timer.collect()

    Work of a GPU counts when the host waits for it, not when it was started.
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._active_phases: list[str] = []
        """Phases entered and not left, outermost first; only the innermost one's clock runs."""
        self._phase_start = 0.0

    def phase(self, name: str) -> _Phase:
        """Return a context manager that counts its body as phase `name`; may be nested."""
        if name not in self._seconds:
            raise ValueError(f"unknown phase {name!r}: one of {', '.join(PHASES)}")
        return _Phase(self, name)

    def collect(self) -> dict[str, float]:
        """Return the seconds by phase since the last call, for every phase of `PHASES`.

        An open phase keeps running, and its time so far is included.
        """
        self._attribute_elapsed()
        phase_seconds, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return phase_seconds

    def _enter(self, name: str) -> None:
        self._attribute_elapsed()
        self._active_phases.append(name)

    def _leave(self) -> None:
        self._attribute_elapsed()
        self._active_phases.pop()

    def _attribute_elapsed(self) -> None:
        """Add the time since the last change to the running phase."""
        now = time.perf_counter()
        if self._active_phases:
            self._seconds[self._active_phases[-1]] += now - self._phase_start
        self._phase_start = now


class _Phase:
    """Context manager of one phase; a class, not a generator, so that it costs only a microsecond."""

    __slots__ = ("_name", "_timer")

    def __init__(self, timer: PhaseTimer, name: str) -> None:
        self._timer = timer
        self._name = name

    def __enter__(self) -> None:
        self._timer._enter(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer._leave()
