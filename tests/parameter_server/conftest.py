"""Server processes of a module's tests, and runs over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from support.server_runs import SECRET, Run
from wanma.parameter_server.server_group import ServerGroup
from wanma.parameter_server.server_host import ServerHost


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerGroup]:
    logs = tmp_path_factory.mktemp("logs")
    group, host = ServerGroup(2, 2, SECRET, logs, lambda _text, _level: None), ServerHost(SECRET, logs)
    group.set_hosts({0: host})
    yield group
    group.close()
    host.close()


@pytest.fixture
def run(group: ServerGroup) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(workers: int = 1, mode: str = "synchronous", **settings: object) -> Run:
        runs.append(Run(group, workers, mode, **settings))
        return runs[-1]

    yield make
    for one in runs:
        one.close()
