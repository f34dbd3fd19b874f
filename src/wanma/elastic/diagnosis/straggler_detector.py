"""Which ranks are slow: what each took for itself, beside its peers and its own best. Pure.

Where ranks wait for each other all steps are equally long, and the slow rank is the one that waits least. So
ranks tell the time of their own work (`board.Work`): waiting for data, forward and backward, without
what they wait in collectives. It is looked at in windows; a rank is slow after some windows in a row in
which it took `factor` times its peers' median, and no longer slow after as many below a lower bar.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from wanma.elastic.protocol.messages import RankWork, Slow

WINDOW_STEPS, WINDOW_SECONDS = 10, 2.0
"""A window has at least so many steps, and is at least so long."""
WINDOWS = 3
"""In a row, to become slow or to be so no longer."""
SHARE_OF_STEP = 0.05
"""What a slow rank loses is at least so much of a step: of little work, twice as long is little."""


@dataclass(frozen=True)
class Took:
    """Of one rank, in one window."""

    data_seconds: float
    """Per step, as is the next."""
    compute_seconds: float

    @property
    def seconds(self) -> float:
        return self.data_seconds + self.compute_seconds


class Stragglers:
    """Judges the ranks of one generation.

    Args:
        factor: times its peers' median; above 1.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._newest: dict[int, RankWork] = {}
        self._window: dict[int, RankWork] = {}
        """As it was when the window began."""
        self._began = 0.0
        self._ranks: dict[int, _Rank] = {}

    def hear(self, works: Iterable[RankWork], world_size: int, now: float) -> list[Slow]:
        """Take note of what ranks have done so far; whom to tell about, where a window has ended by it."""
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
    """What is remembered of one."""

    def __init__(self) -> None:
        self.is_slow = False
        self.best_seconds = float("inf")
        self.steps = 0
        """Of the windows in a row that speak for a change, or have brought the last one."""
        self._windows = 0

    def note(self, took: Took, above: bool, steps: int) -> bool:
        """A window has ended; returns whether the rank is slow now and was not, or the other way round."""
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
    """Where most of what it takes longer goes."""
    others = list(peers)
    data = mine.data_seconds - median(peer.data_seconds for peer in others)
    compute = mine.compute_seconds - median(peer.compute_seconds for peer in others)
    return "waiting for data" if data > compute else "forward and backward"
