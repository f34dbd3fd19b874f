"""Hang detector of one node: silence of its progress board against the timeouts."""

from __future__ import annotations

from wanma.elastic.launch_config import Launch
from wanma.elastic.workers.progress_board import Board, Position


class Watch:
    """Hang detector of one node, by the silence of all its ranks.

    Any report of any rank ends the silence, whatever its step: a long validation is no hang. A user's script
    is not judged while none of its ranks has a session open: it may do what it likes.
    """

    def __init__(self, board: Board, launch: Launch, now: float) -> None:
        self._board, self._launch = board, launch
        self._last_sign = now
        self._calls = [0] * launch.ranks_per_node
        self._stepping = False
        self._born = now
        self._first: Position | None = None
        """Report of the first rank when it was first seen to have finished a step."""
        self.silent = False
        self.period = min(1.0, launch.start_seconds / 10, launch.hang_seconds / 10)

    def look(self, now: float) -> tuple[float, str] | None:
        """Return (seconds of silence, the limit in words) if no rank has reported for too long."""
        positions = [self._board.read(local_rank) for local_rank in range(len(self._calls))]
        if self._launch.is_script and all(position.is_outside for position in positions):
            self._last_sign = now
        for local_rank, position in enumerate(positions):
            if position.calls == self._calls[local_rank]:
                continue
            self._calls[local_rank] = position.calls
            if self._first is None and position.done is not None:
                self._first = position
            self._last_sign = max(self._last_sign, position.seconds)
            # The first change may be the jump to the step that a checkpoint resumes from.
            self._stepping = self._stepping or position.step_changes > 1
        launch, key = self._launch, "hang_timeout_seconds" if self._stepping else "start_timeout_seconds"
        limit = launch.hang_seconds if self._stepping else launch.start_seconds
        silence = now - self._last_sign
        self.silent = silence > limit
        return (silence, f"cluster.{key} = {limit:g}") if self.silent else None

    def pace(self) -> tuple[float, float] | None:
        """Return (seconds of a step, seconds from the ranks' birth to their first finished step), so far.

        None while there is nothing to measure; the first ranks' imports are counted as start.
        """
        if self._first is None or self._first.done is None:
            return None
        now = self._board.read(0)
        if now.done is None or now.done <= self._first.done:
            return None
        steps = now.done - self._first.done
        return (now.seconds - self._first.seconds) / steps, self._first.seconds - self._born
