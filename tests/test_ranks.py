"""A rank that dies in native code is blamed, not those that it took down with it."""

from __future__ import annotations

import os
import signal

import pytest

from support.ranks import RankCrashError, run_ranks
from wanma.job.run.worker import WorkerContext


def crash(worker: WorkerContext) -> None:
    if worker.rank == 1:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)
    raise ConnectionError("closed by peer")


def refuse(worker: WorkerContext) -> None:
    raise ValueError(f"not on rank {worker.rank}")


def test_a_rank_that_crashed_is_blamed_and_not_those_that_it_took_down() -> None:
    with pytest.raises(RankCrashError, match="rank 1 died of SIGSEGV; rank 0 then failed"):
        run_ranks(crash, 2, (), seconds=20)


def test_a_rank_that_fails_has_not_crashed() -> None:
    with pytest.raises(AssertionError, match="not on rank") as caught:
        run_ranks(refuse, 2, (), seconds=20)
    assert not isinstance(caught.value, RankCrashError)
