"""Shells with a limited time, in a terminal, and the command of each engine for one."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from wanma.engines.kubernetes.engine import KubernetesEngine
from wanma.engines.kubernetes.states import Observation
from wanma.engines.lease.shell_time import limit_time
from wanma.engines.local.engine import LocalEngine
from wanma.engines.ray.engine import RayEngine
from wanma.engines.slurm.engine import SlurmEngine
from wanma.engines.ssh.engine import SshEngine

SHORT_GRACE = """\
import signal, sys
from wanma.engines.lease import shell_time
shell_time.END_SIGNALS = ((signal.SIGHUP, 0.5), (signal.SIGTERM, 0.5), (signal.SIGKILL, 5.0))
shell_time.main(sys.argv[1:])
"""
STUBBORN = rb"""nohup setsid sh -c "trap '' HUP TERM; echo started=\$\$=; while :; do sleep 1; done" | cat &
"""


def open_shell(minutes: float) -> tuple[subprocess.Popen[bytes], int]:
    """Start a limited shell in a terminal of its own; return it, and the other end of the terminal."""
    ours, theirs = pty.openpty()
    command = ["setsid", "--ctty", sys.executable, "-P", "-c", SHORT_GRACE, str(minutes), "/bin/sh"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    return process, ours


def read_until(terminal: int, pattern: str) -> str:
    """Read what the terminal shows until it matches, or to its end."""
    text = ""
    with contextlib.suppress(OSError):  # the last process has closed it
        while not re.search(pattern, text) and (part := os.read(terminal, 65536)):
            text += part.decode()
    return text


def test_a_shell_is_warned_and_ends() -> None:
    process, terminal = open_shell(0.02)
    text = read_until(terminal, "(?s)shell_minutes.*shell_minutes")
    assert text.count("cluster.budget.shell_minutes") == 2, text
    assert process.wait(60) == -signal.SIGHUP
    os.close(terminal)


def test_what_a_shell_has_started_ends_also_after_its_terminal() -> None:
    process, terminal = open_shell(0.1)
    os.write(terminal, STUBBORN)
    started = re.search(r"started=(\d+)=", read_until(terminal, r"started=\d+="))
    assert started is not None
    os.close(terminal)
    process.wait(60)
    deadline = time.monotonic() + 60
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(int(started[1])).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_nothing_holds_the_terminal_of_a_shell_that_has_ended() -> None:
    ours, theirs = pty.openpty()
    command = [*limit_time(10.0), "/bin/sh", "-c", "exit 5"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    waiting = select.poll()  # select takes no descriptor from 1,024 on, and this process may have many
    waiting.register(ours, select.POLLIN | select.POLLHUP)
    assert waiting.poll(30_000), "the end of the output"
    assert process.wait(60) == 5
    os.close(ours)


def test_each_engines_command_has_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = tmp_path / "shell"
    shell.write_text("#!/bin/sh\nexit 7\n")
    shell.chmod(0o755)
    monkeypatch.setenv("SHELL", str(shell))
    status = {"containerStatuses": [{"name": "wanma", "state": {"running": {}}}]}
    pod = {"metadata": {"name": "p0"}, "spec": {}, "status": status}
    monkeypatch.setattr(KubernetesEngine, "_observe", lambda *_: Observation({}, [pod]))
    monkeypatch.setattr(RayEngine, "hosts", lambda *_: ("n1",))
    place = {"hostname": "n1", "rank": 0, "folder": str(tmp_path), "code": "", "is_leaving": False}
    nodes = [{"host": ["n1", "n1", None], "python": "", **place}]
    handle: dict[str, Any] = {"host": os.uname().nodename, "jobs": ["7"], "namespace": "n", "nodes": nodes}
    handle |= {"python": sys.executable, "options": [], "settings": {"python": sys.executable}}
    for engine in (LocalEngine(), SlurmEngine(), KubernetesEngine(), SshEngine(), RayEngine()):
        free, limited = (engine.shell_command(handle, None, minutes) for minutes in (None, 0.1))
        if engine.name in ("ssh", "ray"):  # the last word is for a shell there
            assert " ".join(limit_time(0.1)) in limited[-1]
            assert subprocess.run(["/bin/sh", "-c", limited[-1]], check=False).returncode == 7
        else:
            assert limited == [*free[:-1], *limit_time(0.1), free[-1]]
