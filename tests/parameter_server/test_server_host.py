"""Host of servers: on another node it obeys the group of the newest start of the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from wanma.job.errors import WanmaError
from wanma.parameter_server import server_host
from wanma.parameter_server.server_host import RemoteHost, ServerHost, wait_for_end

SECRET = b"0" * 32


@pytest.fixture
def host(tmp_path: Path) -> Iterator[ServerHost]:
    host = ServerHost(SECRET, tmp_path, is_remote=True)
    yield host
    host.close()


def group(host: ServerHost, name: str, generation: int) -> RemoteHost:
    assert host.endpoint is not None
    return RemoteHost(host.endpoint, SECRET, name, generation)


def test_servers_of_an_earlier_group_end_and_it_is_refused(host: ServerHost) -> None:
    old, new = group(host, "old", 1), group(host, "new", 2)
    first = old.start(3)
    assert psutil.pid_exists(first.process_id)
    second = new.start(3)
    wait_for_end(host, first)
    assert not psutil.pid_exists(first.process_id)
    with pytest.raises(WanmaError, match="earlier start"):
        old.end(3)
    os.kill(second.process_id, signal.SIGKILL)
    wait_for_end(new, second)
    assert new.end(3) == "by signal 9"


class EndedProcess(subprocess.Popen[str]):
    """Process that has ended before it is used."""

    def __init__(self, *arguments: Any, **keys: Any) -> None:
        super().__init__(*arguments, **keys)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize(("script", "cause"), [("exec sleep 5", "silent"), ("exit 3", "exit code 3")])
def test_a_process_that_does_not_start_is_an_error_with_its_cause_and_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, cause: str
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    if cause == "silent":
        monkeypatch.setattr(server_host, "_START_SECONDS", 0.1)
    else:
        monkeypatch.setattr(subprocess, "Popen", EndedProcess)
    with closing(ServerHost(SECRET, tmp_path)) as host, pytest.raises(WanmaError, match=cause) as error:
        host.start(3)
    assert "server-3.log" in error.value.hint
