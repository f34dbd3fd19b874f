"""The coordinator's hand on the run directory."""

from __future__ import annotations

import time
from pathlib import Path

from support.waiting import wait_until
from wanma.elastic.coordinator.claim_heartbeat import ClaimHeartbeat
from wanma.elastic.transport.event_loop import EventLoop
from wanma.job.run.folder_claims import FolderClaims
from wanma.job.run.generation_claims import Claim


def claim(generation: int, name: str) -> Claim:
    return Claim(generation, "10.0.0.1:29500", name, "host")


def test_a_newer_claim_of_another_is_news_and_one_s_own_is_not(loop: EventLoop, tmp_path: Path) -> None:
    heard: list[Claim] = []
    FolderClaims(tmp_path).create(claim(1, "mine"))
    beacon = ClaimHeartbeat(loop, FolderClaims(tmp_path), "mine", 1, 0.01, heard.append)
    FolderClaims(tmp_path).create(claim(2, "mine"))
    loop.run_until(lambda: bool(heard), time.monotonic() + 0.2)
    assert heard == []
    FolderClaims(tmp_path).create(claim(3, "other"))
    assert loop.run_until(lambda: bool(heard), time.monotonic() + 10)
    assert [one.coordinator for one in heard] == ["other"]
    beacon.close()


def test_the_claim_that_is_one_s_own_is_kept_alive(loop: EventLoop, tmp_path: Path) -> None:
    FolderClaims(tmp_path).create(claim(1, "mine"))
    beacon = ClaimHeartbeat(loop, FolderClaims(tmp_path), "mine", 1, 0.01, lambda _claim: None)
    before = FolderClaims(tmp_path).read_heartbeat(1)
    loop.run_until(lambda: False, time.monotonic() + 0.2)
    assert FolderClaims(tmp_path).read_heartbeat(1) == before, "not before it is"
    beacon.owns_claim = True
    wait_until(lambda: FolderClaims(tmp_path).read_heartbeat(1) != before, "a heartbeat", 10)
    beacon.close()
