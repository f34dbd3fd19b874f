"""Host of servers on another node: it obeys the group of the newest start of the run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from wanma.job.errors import WanmaError
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
