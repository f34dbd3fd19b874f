"""Straggler detector: work time of each rank against its peers' median and its own best; pure.

Ranks that wait for each other all have equally long steps, and the straggler is the one that waits least. So
ranks report their work time (`progress_board.Work`): data loading, forward and backward, without their waits
in collectives. It is judged in windows; a rank becomes a straggler after some windows in a row in which it
took `factor` times its peers' median, and stops being one after as many below a lower bar.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from wanma.elastic.protocol.messages import RankWork, Slow

WINDOW_STEPS, WINDOW_SECONDS = 10, 2.0
"""Least steps, and least seconds, of a window."""
WINDOWS = 3
"""Number of windows in a row that make a rank a straggler, or end that."""
SHARE_OF_STEP = 0.05
"""Least loss of a straggler, as a share of the step: twice a little work is little."""


@dataclass(frozen=True)
class Took:
    """Work time of one rank in one window."""

    data_seconds: float
    """Data loading time per step, in seconds."""
    compute_seconds: float

    @property
    def seconds(self) -> float:
        return self.data_seconds + self.compute_seconds


class Stragglers:
    """Straggler detector of one generation.

    Args:
        factor: ratio to its peers' median from which a rank is a straggler; above 1.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._newest: dict[int, RankWork] = {}
        self._window: dict[int, RankWork] = {}
        """Work times at the start of the window."""
        self._began = 0.0
        self._ranks: dict[int, _Rank] = {}

    def hear(self, works: Iterable[RankWork], world_size: int, now: float) -> list[Slow]:
        """Add the ranks' work times so far; return the changes to report if they complete a window."""
        for work in works:
            self._newest[work.rank] = work
        if len(self._newest) < world_size:
            return []
        if not self._window:
            self._window, self._began = dict(self._newest), now
            return []
        steps = {rank: work.steps - self._window[rank].steps for rank, work in self._newest.items()}
        if now - self._began < WINDOW_SECONDS or min(steps.values()) < WINDOW_STEPS:
            return []
        took = {rank: _took(self._window[rank], work, steps[rank]) for rank, work in self._newest.items()}
        step_seconds = (now - self._began) / max(steps.values())
        found = self._judge(took, steps, step_seconds)
        self._window, self._began = dict(self._newest), now
        return found

    def _judge(self, took: Mapping[int, Took], steps: Mapping[int, int], step_seconds: float) -> list[Slow]:
        verdicts = []
        for rank, mine in took.items():
            group = self._newest[rank].group
            peers = [took[peer] for peer in took if peer != rank and self._newest[peer].group == group]
            if not peers:
                continue
            usual = median(peer.seconds for peer in peers)
            ratio = mine.seconds / max(usual, 1e-9)
            one = self._ranks.setdefault(rank, _Rank())
            matters = mine.seconds - usual >= SHARE_OF_STEP * step_seconds
            bar = 1 + (self._factor - 1) / 2 if one.is_slow else self._factor
            changes = one.note(mine, above=ratio >= bar and matters, steps=steps[rank])
            if changes:
                phase = _worst_phase(mine, peers)
                verdicts.append(
                    Slow(rank, one.is_slow, phase, ratio, mine.seconds, usual, one.best_seconds, one.steps)
                )
        return verdicts


class _Rank:
    """History of one rank."""

    def __init__(self) -> None:
        self.is_slow = False
        self.best_seconds = float("inf")
        self.steps = 0
        """Steps of the windows in a row that speak for a change, or have brought the last one."""
        self._windows = 0

    def note(self, took: Took, above: bool, steps: int) -> bool:
        """Add a finished window; return True if the rank has become, or has stopped being, a straggler."""
        self.best_seconds = min(self.best_seconds, took.seconds)
        if above == self.is_slow:
            self._windows = self.steps = 0
            return False
        self._windows += 1
        self.steps += steps
        if self._windows < WINDOWS:
            return False
        self.is_slow, self._windows = above, 0
        return True


def _took(before: RankWork, after: RankWork, steps: int) -> Took:
    return Took(
        (after.data_seconds - before.data_seconds) / steps,
        (after.compute_seconds - before.compute_seconds) / steps,
    )


def _worst_phase(mine: Took, peers: Iterable[Took]) -> str:
    """Return the phase in which a rank loses most against its peers."""
    others = list(peers)
    data = mine.data_seconds - median(peer.data_seconds for peer in others)
    compute = mine.compute_seconds - median(peer.compute_seconds for peer in others)
    return "waiting for data" if data > compute else "forward and backward"
