"""A run whose rank dies in native code is told and tried once more; whatever else fails is not."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from support import ranks
from support.ranks import RankCrashError, run_job, run_ranks
from wanma.job.plan import Plan
from wanma.job.worker import Worker


def crash(worker: Worker) -> None:
    if worker.rank == 1:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)
    raise ConnectionError("closed by peer")


def refuse(worker: Worker) -> None:
    raise ValueError(f"not on rank {worker.rank}")


def test_a_rank_that_crashed_is_blamed_and_not_those_that_it_took_down() -> None:
    with pytest.raises(RankCrashError, match="rank 1 died of SIGSEGV; rank 0 then failed"):
        run_ranks(crash, 2, (), seconds=20)


def test_a_rank_that_fails_has_not_crashed() -> None:
    with pytest.raises(AssertionError, match="not on rank") as caught:
        run_ranks(refuse, 2, (), seconds=20)
    assert not isinstance(caught.value, RankCrashError)


@pytest.mark.parametrize("crashes", [1, 2])
def test_a_run_is_repeated_once_from_its_beginning(
    crashes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, calls = tmp_path / "run", []

    def run(*_arguments: Any) -> None:
        assert not directory.exists()
        directory.mkdir()
        calls.append(directory)
        if len(calls) <= crashes:
            raise RankCrashError("rank 1 died of SIGSEGV")

    monkeypatch.setattr(ranks, "run_ranks", run)
    if crashes == 1:
        with pytest.warns(UserWarning, match="SIGSEGV; the run is repeated"):
            run_job(directory, {}, Plan())
    else:
        with pytest.warns(UserWarning, match="repeated"), pytest.raises(RankCrashError):
            run_job(directory, {}, Plan())
    assert len(calls) == 2
