"""A rank that is slow while all others wait for it is named.

Every day: what ranks tell in tests/training/balancing/test_rank_timing.py, and what is made of it in
tests/elastic/detection/test_straggler_detector.py.
"""

from __future__ import annotations

import signal
import socket

import pytest

from support.command import Desk
from support.injection import Fault, injected
from wanma.cli.main import main


@pytest.mark.full
def test_the_slow_rank_is_named_with_what_it_loses_and_recorded(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = Fault("slow", rank=1, step=0, phase="building the model", argument="0.05")
    running = desk.start(
        "train", "text.toml", "train.steps=5000", "--run-dir", "slow", **injected(desk.folder / "marks", slow)
    )
    training = desk.training("slow")
    running.until(lambda: any(event["kind"] == "straggler" for event in training.events))
    running.signal(signal.SIGINT)
    ran = running.end()
    ran.check(130)
    [event] = [event for event in training.events if event["kind"] == "straggler"]
    host = socket.gethostname()
    assert (event["rank"], event["host"], event["node"], event["is_slow"]) == (1, host, 0, True)
    assert event["phase"] == "forward and backward"
    assert event["seconds"] > 0.05 > event["peers_seconds"]
    assert event["ratio"] == event["seconds"] / event["peers_seconds"] > 1.5
    assert event["local_rank"] == 1
    assert f"rank 1 ({host}, local rank 1) is a" in ran.out
    assert "rank 0 (" not in ran.out
    assert main(["show", str(training.path)]) == 0
    assert f"rank 1 ({host}, local rank 1) is a" in capsys.readouterr().out
