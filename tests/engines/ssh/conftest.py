"""Two hosts that are reached by ssh."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.ssh import SshSite, ssh_hosts


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshSite]:
    with ssh_hosts(tmp_path, 2) as made:
        monkeypatch.chdir(made.project)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        yield made
