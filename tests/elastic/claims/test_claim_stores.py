"""The contract of claim stores, for a folder and for an object store, and what is the latter's alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.object_store import ObjectStore, object_store
from wanma.elastic.claims import object_claims
from wanma.elastic.claims.claim_stores import open_claim_store
from wanma.elastic.claims.object_claims import ObjectClaims
from wanma.elastic.coordinator.claim_heartbeat import ClaimHeartbeat
from wanma.elastic.transport.event_loop import EventLoop
from wanma.job.errors import WanmaError
from wanma.job.run.folder_claims import FolderClaims
from wanma.job.run.generation_claims import Claim, ClaimStore
from wanma.job.run.run_directory import RunDirectory
from wanma.observe.recorder import Recorder
from wanma.observe.sinks.jsonl import JsonLinesSink

ROUNDS = 25
PATIENCE_SECONDS = 60.0
"""Deadline of requests, on a busy machine."""


def claim(generation: int, name: str = "one") -> Claim:
    return Claim(generation, "10.0.0.1:29500", name, "host", 0)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    with object_store(monkeypatch) as store:
        yield store


@pytest.fixture
def objects(store: ObjectStore) -> ObjectClaims:
    return ObjectClaims(store.url("run"), PATIENCE_SECONDS)


@pytest.fixture(params=["folder", "object store"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path)
    store: ObjectStore = request.getfixturevalue("store")
    return store.url("run")


@pytest.fixture
def claims(location: str, tmp_path: Path) -> ClaimStore:
    claims = open_claim_store(location, tmp_path / "elsewhere")
    if isinstance(claims, ObjectClaims):
        claims.deadline_seconds = PATIENCE_SECONDS
    claims.check_usable()
    return claims


def test_a_number_is_claimed_once_and_closes_the_older_ones(claims: ClaimStore) -> None:
    assert claims.newest() is None
    assert claims.newest_after(0) is None
    assert claims.create(claim(1))
    assert claims.create(claim(1)), "to claim what one has is no mistake"
    assert not claims.create(claim(1, "other"))
    assert claims.newest() == claims.newest_after(0) == claim(1)
    assert claims.newest_after(1) is None
    assert claims.create(claim(2, "other"))
    assert claims.newest() == claims.newest_after(1) == claims.newest_after(0) == claim(2, "other")
    older = claims.read(1)
    assert older is not None
    assert (older.coordinator, older.followed, older.ended) == ("one", True, None)
    assert claims.read(3) is None


def test_the_fence_holds_as_soon_as_there_is_a_newer_claim(claims: ClaimStore) -> None:
    for generation in (1, 2):
        claims.create(claim(generation))
    fences = [claims.fence(generation) for generation in (1, 2)]
    for check in (fences[0].check, fences[0].check_record):
        with pytest.raises(WanmaError, match=r"generation 1 .* 2 \(coordinator 10"):
            _until_known(check)
    for check in (fences[1].check, fences[1].check_record):
        check()


def _until_known(check: Callable[[], None]) -> None:
    """The fence of an object store asks in the background."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        check()
        time.sleep(0.05)


def test_a_coordinator_that_died_between_its_claim_and_the_closing_of_older_ones_is_followed(
    claims: ClaimStore, tmp_path: Path
) -> None:
    claims.create(claim(1))
    values = {"place": "10.0.0.2:29500", "coordinator": "dead", "host": "host", "node": 1}
    if isinstance(claims, FolderClaims):
        (tmp_path / "generations" / "2").write_text(json.dumps({"generation": 2, **values}) + "\n")
    else:
        assert isinstance(claims, ObjectClaims)
        claims._open().write("2", json.dumps(values).encode())
    newest = claims.newest()
    assert newest is not None
    assert (newest.generation, newest.coordinator) == (2, "dead")
    assert not claims.create(claim(2))
    assert claims.create(claim(3))
    for generation in (1, 2):
        with pytest.raises(WanmaError, match="superseded by generation 3"):
            claims.fence(generation).check()
    claims.fence(3).check()


def test_the_end_of_a_run_is_no_successor(claims: ClaimStore) -> None:
    claims.create(claim(1))
    claims.record_end(1, 130)
    found = claims.read(1)
    assert found is not None
    assert (found.followed, found.ended) == (False, 130)
    claims.fence(1).check()


def test_a_sign_of_life_shows_and_votes_are_counted(claims: ClaimStore) -> None:
    claims.create(claim(1))
    seen = {claims.read_heartbeat(1)}
    for _ in range(3):
        time.sleep(0.02)  # of the clock of a file system
        claims.write_heartbeat(1)
        seen.add(claims.read_heartbeat(1))
    assert len(seen) == 4
    assert claims.read_heartbeat(2) is None
    for node in (1, 2):
        claims.vote_lost(1, node)
    claims.vote_lost(12, 0)
    claims.withdraw_vote(1, 1)
    claims.withdraw_vote(1, 5)
    assert claims.lost_votes(1) == {2}
    newest = claims.newest()
    assert newest is not None
    assert newest.generation == 1, "a vote is no claim"


@pytest.mark.slow
def test_of_two_processes_that_claim_a_generation_at_once_exactly_one_has_it(
    location: str, claims: ClaimStore
) -> None:
    command = [sys.executable, "-m", "support.claim_race", location]
    tests = str(Path(__file__).parents[2])
    racers = [
        subprocess.Popen(
            [*command, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**_environment(), "PYTHONPATH": f"{tests}:{_environment().get('PYTHONPATH', '')}"},
        )
        for name in ("one", "other")
    ]
    assert [_line(racer) for racer in racers] == ["ready", "ready"]
    wins: Counter[int] = Counter()
    for generation in range(1, ROUNDS + 1):
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write(f"{generation}\n")
            racer.stdin.flush()
        answers = [int(_line(racer)) for racer in racers]
        assert sum(answers) == 1, f"generation {generation}: {answers}"
        wins[answers.index(1)] += 1
        found = claims.read(generation)
        assert found is not None
        assert found.coordinator == ("one", "other")[answers.index(1)]
    for racer in racers:
        racer.communicate()
    assert wins.total() == ROUNDS


def _environment() -> dict[str, str]:
    return dict(os.environ)


def _line(racer: subprocess.Popen[str]) -> str:
    assert racer.stdout is not None
    return racer.stdout.readline().strip()


# Object store ------------------------------------------------------------------------------------


def test_storage_without_conditional_create_is_refused_by_name(store: ObjectStore) -> None:
    with pytest.raises(WanmaError, match=r"'sftp://host/run': .* 'sftp' has no") as raised:
        ObjectClaims("sftp://host/run").check_usable()
    assert "a folder that all nodes share" in raised.value.hint
    store.is_conditional = False
    with pytest.raises(WanmaError, match=r"'s3://bucket/run': .* conditional") as raised:
        ObjectClaims(store.url("run")).check_usable()
    assert "s3fs 2024.12 or newer" in raised.value.hint
    assert store.names("run") == []


def test_a_claim_whose_answer_was_lost_on_its_way_is_one_s_own(
    store: ObjectStore, objects: ObjectClaims, monkeypatch: pytest.MonkeyPatch
) -> None:
    filesystem = objects._open()._filesystem
    create = filesystem.pipe_file

    def loses_the_answer(*arguments: object, **keywords: object) -> None:
        create(*arguments, **keywords)
        raise ConnectionResetError("reset by peer")

    monkeypatch.setattr(filesystem, "pipe_file", loses_the_answer)
    assert objects.create(claim(1))
    assert not objects.create(claim(1, "other"))


def test_requests_are_few(store: ObjectStore, objects: ObjectClaims, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times faster: 36 in a minute are 18 in three seconds."""
    monkeypatch.setattr(object_claims, "FENCE_POLL_SECONDS", object_claims.FENCE_POLL_SECONDS / 10)
    loop = EventLoop()
    objects.create(claim(1))
    store.requests.clear()
    fence = objects.fence(1)
    beacon = ClaimHeartbeat(loop, objects, "one", 1, objects.heartbeat_seconds / 10, lambda _: None)
    beacon.owns_claim = True
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        fence.check_record()  # far more often than the store is asked
        time.sleep(0.001)
    beacon.close()
    loop.close()
    assert len(store.requests) <= 19, Counter(store.requests)
    assert {request.split()[0] for request in store.requests} == {"GET", "PUT"}, "nothing is listed"
    store.requests.clear()
    objects.fence(1).check()
    assert store.requests == ["GET 2"]


def test_a_store_that_is_gone_stops_commits_at_a_deadline_and_records_after_a_while(
    store: ObjectStore, objects: ObjectClaims, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(object_claims, "COMMIT_DEADLINE_SECONDS", 1.5)
    monkeypatch.setattr(object_claims, "RECORD_VALIDITY_SECONDS", 1.0)
    monkeypatch.setattr(object_claims, "FENCE_POLL_SECONDS", 0.1)
    objects.create(claim(1))
    fence = objects.fence(1)
    recorder = Recorder(RunDirectory(tmp_path), [JsonLinesSink()], 1, fence.check_record)
    recorder.message("first")
    store.is_gone, objects.deadline_seconds = True, 0.3
    with pytest.raises(WanmaError, match="cannot read the claims of the run") as raised:
        fence.check()
    assert "nothing is committed until it answers" in raised.value.hint
    asking: list[str] = []
    ask = objects.newest_after

    def noted(generation: int) -> Claim | None:
        asking.append(threading.current_thread().name)
        return ask(generation)

    monkeypatch.setattr(objects, "newest_after", noted)
    recorder.message("lost")
    assert "MainThread" not in asking, "no step waits for the store"
    objects.deadline_seconds = PATIENCE_SECONDS
    store.is_gone = False
    deadline = time.monotonic() + 30
    while "last" not in (text := (tmp_path / "events.jsonl").read_text()):
        assert time.monotonic() < deadline
        recorder.message("last")
        time.sleep(0.1)
    assert "lost" not in text
    recorder.close()
    fence.check()


def test_a_process_that_stood_still_asks_before_it_records(store: ObjectStore, objects: ObjectClaims) -> None:
    objects.create(claim(1))
    fence = objects.fence(1)
    fence.check_record()
    time.sleep(0.3)  # the first request in the background is over; the next is seconds away
    ObjectClaims(store.url("run"), PATIENCE_SECONDS).create(claim(2, "other"))
    fence.check_record()
    fence._asked_at -= object_claims.RECORD_VALIDITY_SECONDS + 1  # type: ignore[attr-defined]
    with pytest.raises(WanmaError, match="superseded by generation 2"):
        fence.check_record()


def test_a_listing_of_before_hides_no_claim(store: ObjectStore, objects: ObjectClaims) -> None:
    """S3fs keeps listings, and takes an object that they lack for missing."""
    objects.create(claim(1))
    assert objects.newest() == claim(1)
    ObjectClaims(store.url("run"), PATIENCE_SECONDS).create(claim(2, "other"))
    assert objects.newest_after(1) == claim(2, "other")
