"""Straggler detector: work time of each rank against its peers' median and its own best; pure.

Ranks that wait for each other all have equally long steps, and the straggler is the one that waits least. So
ranks report their work time (`progress_board.ReportedWork`): data loading, forward and backward, without
their waits in collectives. It is judged in windows; a rank becomes a straggler after some windows in a row in
which it took `factor` times its peers' median, and stops being one after as many below a lower bar.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from wanma.elastic.protocol.messages import RankWorkTime, StragglerReport

WINDOW_STEPS, WINDOW_SECONDS = 10, 2.0
"""Least steps, and least seconds, of a window."""
CONSECUTIVE_WINDOWS = 3
"""Number of windows in a row that make a rank a straggler, or end that."""
MIN_LOST_STEP_FRACTION = 0.05
"""Least loss of a straggler, as a share of the step: twice a little work is little."""


@dataclass(frozen=True)
class WindowWorkTime:
    """Work time of one rank in one window."""

    data_seconds: float
    """Data loading time per step, in seconds."""
    compute_seconds: float

    @property
    def seconds(self) -> float:
        return self.data_seconds + self.compute_seconds


class StragglerDetector:
    """Straggler detector of one generation.

    Args:
        factor: ratio to its peers' median from which a rank is a straggler; above 1.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._newest: dict[int, RankWorkTime] = {}
        self._window_start: dict[int, RankWorkTime] = {}
        """Work times at the start of the window."""
        self._window_start_time = 0.0
        self._history_by_rank: dict[int, _RankHistory] = {}

    def update(
        self, work_times: Iterable[RankWorkTime], world_size: int, now: float
    ) -> list[StragglerReport]:
        """Add the ranks' work times so far; return the changes to report if they complete a window."""
        for work in work_times:
            self._newest[work.rank] = work
        if len(self._newest) < world_size:
            return []
        if not self._window_start:
            self._window_start, self._window_start_time = dict(self._newest), now
            return []
        steps = {rank: work.steps - self._window_start[rank].steps for rank, work in self._newest.items()}
        if now - self._window_start_time < WINDOW_SECONDS or min(steps.values()) < WINDOW_STEPS:
            return []
        window_times = {
            rank: _window_work_time(self._window_start[rank], work, steps[rank])
            for rank, work in self._newest.items()
        }
        step_seconds = (now - self._window_start_time) / max(steps.values())
        reports = self._find_changes(window_times, steps, step_seconds)
        self._window_start, self._window_start_time = dict(self._newest), now
        return reports

    def _find_changes(
        self, window_times: Mapping[int, WindowWorkTime], steps: Mapping[int, int], step_seconds: float
    ) -> list[StragglerReport]:
        verdicts = []
        for rank, work_time in window_times.items():
            group = self._newest[rank].peer_group
            peers = [
                window_times[peer]
                for peer in window_times
                if peer != rank and self._newest[peer].peer_group == group
            ]
            if not peers:
                continue
            median_seconds = median(peer.seconds for peer in peers)
            ratio = work_time.seconds / max(median_seconds, 1e-9)
            history = self._history_by_rank.setdefault(rank, _RankHistory())
            matters = work_time.seconds - median_seconds >= MIN_LOST_STEP_FRACTION * step_seconds
            bar = 1 + (self._factor - 1) / 2 if history.is_straggler else self._factor
            changes = history.add_window(
                work_time, is_above_threshold=ratio >= bar and matters, steps=steps[rank]
            )
            if changes:
                phase = _worst_phase(work_time, peers)
                verdicts.append(
                    StragglerReport(
                        rank,
                        history.is_straggler,
                        phase,
                        ratio,
                        work_time.seconds,
                        median_seconds,
                        history.best_seconds,
                        history.steps,
                    )
                )
        return verdicts


class _RankHistory:
    """History of one rank."""

    def __init__(self) -> None:
        self.is_straggler = False
        self.best_seconds = float("inf")
        self.steps = 0
        """Steps of the windows in a row that speak for a change, or have brought the last one."""
        self._windows = 0

    def add_window(self, work_time: WindowWorkTime, is_above_threshold: bool, steps: int) -> bool:
        """Add a finished window; return True if the rank has become, or has stopped being, a straggler."""
        self.best_seconds = min(self.best_seconds, work_time.seconds)
        if is_above_threshold == self.is_straggler:
            self._windows = self.steps = 0
            return False
        self._windows += 1
        self.steps += steps
        if self._windows < CONSECUTIVE_WINDOWS:
            return False
        self.is_straggler, self._windows = is_above_threshold, 0
        return True


def _window_work_time(before: RankWorkTime, after: RankWorkTime, steps: int) -> WindowWorkTime:
    return WindowWorkTime(
        (after.data_seconds - before.data_seconds) / steps,
        (after.compute_seconds - before.compute_seconds) / steps,
    )


def _worst_phase(work_time: WindowWorkTime, peers: Iterable[WindowWorkTime]) -> str:
    """Return the phase in which a rank loses most against its peers."""
    peer_times = list(peers)
    data = work_time.data_seconds - median(peer.data_seconds for peer in peer_times)
    compute = work_time.compute_seconds - median(peer.compute_seconds for peer in peer_times)
    return "waiting for data" if data > compute else "forward and backward"
