"""Worker monitor: sends hang alarms, work times and rank statuses of one worker group to the coordinator."""

from __future__ import annotations

import time
from collections.abc import Callable

from wanma.elastic.detection.straggler_detector import WINDOW_SECONDS
from wanma.elastic.protocol.messages import (
    HangAlarm,
    HangAlarmReset,
    Message,
    ProgressReport,
    RankStatusReport,
    WorkTimeReport,
)
from wanma.elastic.supervisor.worker_group import WorkerGroup
from wanma.elastic.transport.event_loop import EventLoop

STATUS_REPLY_SECONDS = 2.0
"""Time, in seconds, that ranks may take to report their status."""


class WorkerMonitor:
    """Monitor of one worker group, from its start until the group or the run ends.

    Args:
        worker_group: worker group.
        loop: event loop.
        send: sends a message to the coordinator.
        is_current: returns False once the run ends, or the group is being terminated or was replaced.
        before_check: called before each check for a hang.
        nodes: number of nodes of the run.
    """

    def __init__(
        self,
        worker_group: WorkerGroup,
        loop: EventLoop,
        send: Callable[[Message], None],
        *,
        is_current: Callable[[], bool],
        before_check: Callable[[], None],
        nodes: int,
    ) -> None:
        self._worker_group, self._loop, self._send = worker_group, loop, send
        self._is_current, self._before_check = is_current, before_check
        self._work_time_interval = max(WINDOW_SECONDS / 2, nodes / 100)
        """Time, in seconds, between reports of work time; the coordinator gets at most 100 a second."""
        loop.call_later(worker_group.hang_detector.check_interval_seconds, self._check_hang)
        loop.call_later(self._work_time_interval, self._report_work_times)

    @property
    def _is_running(self) -> bool:
        return self._is_current() and not self._worker_group.has_exited

    def _check_hang(self) -> None:
        """Check whether any rank has made progress."""
        if not self._is_running:
            return
        self._before_check()
        detector = self._worker_group.hang_detector
        was_silent = detector.is_silent
        hang = detector.check(time.monotonic())
        if hang is not None and not was_silent:
            self._send(HangAlarm(*hang))
        elif hang is None and was_silent:
            self._send(HangAlarmReset())
        self._loop.call_later(detector.check_interval_seconds, self._check_hang)

    def _report_work_times(self) -> None:
        """Send the work time of the ranks here, to be compared with the others'."""
        if not self._is_running:
            return
        self._send(WorkTimeReport(self._worker_group.read_work_times()))
        self._loop.call_later(self._work_time_interval, self._report_work_times)

    def report_rank_statuses(self, hostname: str) -> None:
        """Ask the ranks for their status, and send it a little later."""
        self._worker_group.request_rank_statuses()

        def report() -> None:
            if self._is_current():
                self._send(RankStatusReport(self._worker_group.read_rank_statuses(hostname)))

        self._loop.call_later(STATUS_REPLY_SECONDS, report)


def make_progress_report(worker_group: WorkerGroup | None) -> ProgressReport:
    """Return the newest step of a worker group, and its step timing; None: there is no group yet."""
    if worker_group is None:
        return ProgressReport(None, None, None)
    timing = worker_group.hang_detector.measure_step_timing()
    return ProgressReport(worker_group.last_finished_step, *(timing or (None, None)))
