"""Snapshots of a loop of one's own: they are taken and taken up as those of a whole job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import wanma
from support.compare import equal
from support.faults import InjectedError
from support.images import Held
from support.own import Numbers, Plain, seeded
from support.own_loop import per_sample, session_job, started_by_launch
from support.ranks import Outcome, run_ranks
from wanma.job.run.worker import MemoryFilePaths, WorkerContext

JOB = session_job(checkpoint={"every_steps": 0, "in_memory_every_steps": 1})


def test_a_session_that_failed_goes_on_from_memory_bit_for_bit(tmp_path: Path) -> None:
    run_ranks(_loop, 2, (tmp_path / "whole", None, None), is_reused=True)
    held, after = Held(2), Held(2)
    with pytest.raises(AssertionError, match="the user's own mistake"):
        run_ranks(_loop, 2, (tmp_path / "run", [held.images(rank) for rank in range(2)], 3))
    assert held.steps() == {1, 2}
    images = [after.images(rank, held, 2) for rank in range(2)]
    run_ranks(_loop, 2, (tmp_path / "run", images, None), is_reused=True)
    whole, run = Outcome(tmp_path / "whole"), Outcome(tmp_path / "run")
    assert '"source": "its in-memory checkpoint"' in (tmp_path / "run" / "events.jsonl").read_text()
    assert run.losses == whole.losses
    equal(whole, run)
    assert after.steps() == {3}


def _loop(
    worker: WorkerContext, directory: Path, images: list[MemoryFilePaths] | None, fails_in: int | None
) -> Any:
    mine = None if images is None else images[worker.rank]
    job = {**JOB, "parallel": {"dp_shard": 2}}
    with started_by_launch(worker, directory, memory_files=mine), wanma.session(job) as session:
        model = session.prepare(seeded(Plain))
        for step, batch in enumerate(session.batches(Numbers()), 1):
            if step == fails_in:
                raise InjectedError("the user's own mistake")
            session.step(per_sample(model, batch))
