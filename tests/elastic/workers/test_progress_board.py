"""Reports of ranks on the page of shared memory that their supervisor reads."""

from __future__ import annotations

from wanma.elastic.workers.progress_board import ProgressBoard, ReportedWork
from wanma.job.run.worker import StepWork


def test_work_and_progress_of_each_rank_have_places_of_their_own() -> None:
    board = ProgressBoard.create(2)
    for rank in range(2):
        writer = board.writer(rank)
        writer.report_progress(7 + rank, "forward" * 10)
        for retries in (0, 3 + rank):
            writer.report_work(StepWork(rank, 0.5, 2.0, 1 << 40, retries))
    works = [board.read_work(rank) for rank in range(2)]
    assert works == [ReportedWork(rank, 1.0, 4.0, 1 << 40, 3 + rank, 2) for rank in range(2)]
    assert [board.read_progress(rank).step for rank in range(2)] == [7, 8]
    board.close()
