"""Stop signals from the first lines of a command to those after its supervisor's end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from wanma.elastic.supervisor.stop_signals import ReceivedSignals, StartHandler, StopRequest
from wanma.elastic.transport.event_loop import EventLoop

JOB = """
[model]
preset = "gpt-1m"
[data]
text = ["stdlib"]
[cluster]
requeue_exit_code = 75
[observe]
callbacks = ["slow:Slow"]
"""
SLOW = """
import time
class Slow:
    def __init__(self):
        print("waits", flush=True)
        while True:
            time.sleep(0.01)
"""


def test_a_stop_before_the_ranks_ends_the_command_with_the_exit_code_of_its_job(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "slow.py").write_text(SLOW)
    command = subprocess.Popen(
        [sys.executable, "-m", "wanma", "train", "job.toml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert command.stdout is not None
    assert command.stdout.readline() == "waits\n"
    command.send_signal(signal.SIGUSR1)
    _, errors = command.communicate(timeout=60)
    assert (command.returncode, errors.count("SIGUSR1")) == (75, 1), errors
    assert "Traceback" not in errors


def test_a_stop_raises_until_the_loop_receives_it_and_after_the_loop_does_nothing() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    try:
        StartHandler.install()
        with pytest.raises(StopRequest):
            signal.raise_signal(signal.SIGUSR1)
        received: list[int] = []
        loop = EventLoop()
        ReceivedSignals().listen(loop, received.append)
        signal.raise_signal(signal.SIGUSR1)
        loop.run_until(lambda: bool(received))
        loop.close()
        signal.raise_signal(signal.SIGUSR1)
        assert received == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)
