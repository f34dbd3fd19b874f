"""Hang detector of one node: silence of its progress board against the timeouts."""

from __future__ import annotations

from wanma.elastic.launch_config import LaunchConfig
from wanma.elastic.workers.progress_board import ProgressBoard, RankProgress


class HangDetector:
    """Hang detector of one node, by the silence of all its ranks.

    Any report of any rank ends the silence, whatever its step: a long validation is no hang. A user's script
    is not judged while none of its ranks has a session open: it may do what it likes.
    """

    def __init__(self, board: ProgressBoard, launch: LaunchConfig, now: float) -> None:
        self._board, self._launch = board, launch
        self._last_report = now
        self._report_counts = [0] * launch.ranks_per_node
        self._has_stepped = False
        self._started_at = now
        self._first_finished_step: RankProgress | None = None
        """Report of the first rank when it was first seen to have finished a step."""
        self.is_silent = False
        self.check_interval_seconds = min(
            1.0, launch.start_timeout_seconds / 10, launch.hang_timeout_seconds / 10
        )

    def check(self, now: float) -> tuple[float, str] | None:
        """Return (seconds of silence, the limit in words) if no rank has reported for too long."""
        positions = [self._board.read_progress(local_rank) for local_rank in range(len(self._report_counts))]
        if self._launch.is_script and all(position.is_outside_session for position in positions):
            self._last_report = now
        for local_rank, position in enumerate(positions):
            if position.report_count == self._report_counts[local_rank]:
                continue
            self._report_counts[local_rank] = position.report_count
            if self._first_finished_step is None and position.last_finished_step is not None:
                self._first_finished_step = position
            self._last_report = max(self._last_report, position.reported_at)
            # The first change may be the jump to the step that a checkpoint resumes from.
            self._has_stepped = self._has_stepped or position.step_change_count > 1
        if self._has_stepped:
            key, limit = "hang_timeout_seconds", self._launch.hang_timeout_seconds
        else:
            key, limit = "start_timeout_seconds", self._launch.start_timeout_seconds
        silence = now - self._last_report
        self.is_silent = silence > limit
        return (silence, f"cluster.{key} = {limit:g}") if self.is_silent else None

    def measure_step_timing(self) -> tuple[float, float] | None:
        """Return (seconds of a step, seconds from the ranks' birth to their first finished step), so far.

        None while there is nothing to measure; the first ranks' imports are counted as start.
        """
        if self._first_finished_step is None or self._first_finished_step.last_finished_step is None:
            return None
        now = self._board.read_progress(0)
        if (
            now.last_finished_step is None
            or now.last_finished_step <= self._first_finished_step.last_finished_step
        ):
            return None
        steps = now.last_finished_step - self._first_finished_step.last_finished_step
        return (
            now.reported_at - self._first_finished_step.reported_at
        ) / steps, self._first_finished_step.reported_at - self._started_at
