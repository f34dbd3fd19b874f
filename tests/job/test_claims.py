"""Claims: a number is claimed once, whoever tries; what has been followed writes nothing any more."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from wanma.job.errors import WanmaError
from wanma.job.run.folder_claims import FolderClaims
from wanma.job.run.generation_claims import Claim
from wanma.job.run.run_directory import RunDirectory
from wanma.observe.recorder import Recorder
from wanma.observe.sinks.jsonl import JsonLinesSink


def claim(generation: int, name: str = "one") -> Claim:
    return Claim(generation, "10.0.0.1:29500", name, "host", 0)


def _try(folder: str, name: str, barrier: Any, won: Any) -> None:
    barrier.wait()
    won.put((name, FolderClaims(Path(folder)).create(claim(1, name))))


def test_of_many_that_claim_a_generation_one_has_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, won = context.Barrier(4), context.Queue()
    tries = [context.Process(target=_try, args=(str(tmp_path), str(n), barrier, won)) for n in range(4)]
    for one in tries:
        one.start()
    results = dict(won.get() for _ in tries)
    for one in tries:
        one.join()
    [winner] = [name for name, has in results.items() if has]
    newest = FolderClaims(tmp_path).newest()
    assert newest is not None
    assert newest.coordinator == winner
    assert FolderClaims(tmp_path).create(claim(1, winner)), "to claim what one has is no mistake"


def test_a_claim_closes_the_older_ones_before_anybody_starts_under_it(tmp_path: Path) -> None:
    assert FolderClaims(tmp_path).newest() is None
    for generation in (1, 2, 4):
        assert FolderClaims(tmp_path).create(claim(generation))
    followed = [found.followed for n in (1, 2, 4) if (found := FolderClaims(tmp_path).read(n)) is not None]
    assert followed == [True, True, False]
    assert FolderClaims(tmp_path).read(3) is None


def test_a_claim_whose_writer_died_over_it_counts_but_leads_nowhere(tmp_path: Path) -> None:
    assert FolderClaims(tmp_path).create(claim(1))
    (tmp_path / "generations" / "2").write_text('{"generation": 2, "pla')
    newest = FolderClaims(tmp_path).newest()
    assert newest is not None
    assert (newest.generation, newest.place) == (2, "")
    assert not FolderClaims(tmp_path).create(claim(2, "other"))
    assert FolderClaims(tmp_path).create(claim(3, "other"))


def test_a_slow_writer_s_claim_is_closed_though_it_was_followed_before_its_line_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert FolderClaims(tmp_path).create(claim(1))
    write = os.write

    def after_another_has_followed(descriptor: int, line: bytes) -> int:
        monkeypatch.setattr(os, "write", write)
        seen = FolderClaims(tmp_path).newest()
        assert seen is not None
        assert (seen.generation, seen.place) == (2, ""), "there, and still empty"
        assert FolderClaims(tmp_path).create(claim(3, "other"))
        return write(descriptor, line)

    monkeypatch.setattr(os, "write", after_another_has_followed)
    assert FolderClaims(tmp_path).create(claim(2, "slow"))
    found = FolderClaims(tmp_path).read(2)
    assert found is not None
    assert (found.coordinator, found.place, found.followed) == ("slow", "10.0.0.1:29500", True)
    with pytest.raises(WanmaError, match=r"generation 2 .* by generation 3"):
        FolderClaims(tmp_path).fence(2).check()
    FolderClaims(tmp_path).fence(3).check()


def test_the_end_of_a_run_is_no_successor(tmp_path: Path) -> None:
    FolderClaims(tmp_path).create(claim(1))
    FolderClaims(tmp_path).record_end(1, 130)
    found = FolderClaims(tmp_path).read(1)
    assert found is not None
    assert (found.followed, found.ended) == (False, 130)
    FolderClaims(tmp_path).fence(1).check()


def test_a_sign_of_life_shows_and_votes_are_counted(tmp_path: Path) -> None:
    FolderClaims(tmp_path).create(claim(1))
    os.utime(tmp_path / "generations" / "1", (1, 1))
    before = FolderClaims(tmp_path).read_heartbeat(1)
    FolderClaims(tmp_path).write_heartbeat(1)
    assert FolderClaims(tmp_path).read_heartbeat(1) != before
    assert FolderClaims(tmp_path).read_heartbeat(2) is None
    for node in (1, 2):
        FolderClaims(tmp_path).vote_lost(1, node)
    FolderClaims(tmp_path).vote_lost(12, 0)
    FolderClaims(tmp_path).withdraw_vote(1, 1)
    assert FolderClaims(tmp_path).lost_votes(1) == {2}
    newest = FolderClaims(tmp_path).newest()
    assert newest is not None
    assert newest.generation == 1, "a vote is no claim"


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "generations").write_text("a file")
    with pytest.raises(WanmaError, match=r"cannot claim .*generations/1"):
        FolderClaims(tmp_path).create(claim(1))


def test_ranks_of_an_older_start_record_nothing_more(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    FolderClaims(tmp_path).create(claim(1))
    recorder = Recorder(run, [JsonLinesSink()], 1, FolderClaims(tmp_path).fence(1).check)
    recorder.message("before")
    FolderClaims(tmp_path).create(claim(2, "other"))
    with pytest.raises(WanmaError, match=r"2 \(coordinator 10.0.0.1:29500"):
        recorder.message("after")
    with pytest.raises(WanmaError, match="superseded by generation 2"):
        Recorder(run, [JsonLinesSink()], 1, FolderClaims(tmp_path).fence(1).check)
    text = run.events.read_text()
    assert "before" in text
    assert "after" not in text
    recorder.close()


def test_where_no_claim_is_seen_there_is_no_fence(tmp_path: Path) -> None:
    FolderClaims(tmp_path).fence(1).check()
